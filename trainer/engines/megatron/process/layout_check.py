"""Checks that ranks can hold a model in the parallel layout that the configuration asks for, on this machine's device."""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import ConfigError

from ....config import TrainerConfig
from ..model_facts import CheckpointShape

_PART = "megatron engine"


def refuse_cpu_beside_cuda(config: TrainerConfig) -> None:
    """Raise `ConfigError` if the trainer is to be on the CPU of a machine with a CUDA device."""
    if config.device == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "trainer.device is cpu, but megatron-core uses the CUDA device of this machine.",
            part="trainer",
            hint="Set trainer.device=auto, or hide the device with CUDA_VISIBLE_DEVICES= in the environment.",
        )


def check_layout(config: TrainerConfig, model: CheckpointShape, ranks: int) -> None:
    """Raise `ConfigError` unless `ranks` ranks can hold the model in the layout that ``trainer.megatron`` asks for."""
    layout = config.megatron
    tensor, pipeline, virtual, expert, context = (
        layout.tensor_parallel,
        layout.pipeline_parallel,
        layout.virtual_pipeline,
        layout.expert_parallel,
        layout.context_parallel,
    )

    def need(holds: bool, problem: str, hint: str) -> None:
        if not holds:
            raise ConfigError(problem, part=_PART, hint=hint)

    def divides(setting: str, value: int, whole: int, what: str) -> None:
        possible = [str(number) for number in range(1, whole + 1) if whole % number == 0 and number <= ranks]
        need(
            whole % value == 0,
            f"trainer.megatron.{setting}={value} does not divide the model's {whole} {what}.",
            f"Possible here: {', '.join(possible)}.",
        )

    need(
        ranks % (tensor * pipeline * context) == 0,
        f"{ranks} trainer ranks cannot be split into copies of the model of {tensor} x {pipeline} ranks"
        " (tensor_parallel x pipeline_parallel)"
        + ("." if context == 1 else f", {context} of which share tokens (context_parallel)."),
        f"Set trainer.ranks to a multiple of {tensor * pipeline * context}, or lower one of these.",
    )
    divides("tensor_parallel", tensor, model.heads, "attention heads")
    divides("tensor_parallel", tensor, model.groups, "key and value heads")
    if model.delta:
        divides("tensor_parallel", tensor, model.delta.key_heads, "key heads of linear attention")
        need(
            context == 1,
            f"trainer.megatron.context_parallel={context}, but the model has linear attention, whose state goes from token to"
            " token.",
            "Set trainer.megatron.context_parallel to 1.",
        )
    if model.intermediate:
        divides("tensor_parallel", tensor, model.intermediate, "rows of its feed-forward layers")
    if model.shared_intermediate:
        divides("tensor_parallel", tensor, model.shared_intermediate, "rows of its shared experts")
    need(
        virtual == 1 or pipeline > 1,
        f"trainer.megatron.virtual_pipeline={virtual} needs a pipeline.",
        "Set trainer.megatron.pipeline_parallel to at least 2, or virtual_pipeline to 1.",
    )
    need(
        model.layers % (pipeline * virtual) == 0,
        f"{model.layers} decoder layers cannot be split evenly into {pipeline} x {virtual} stages"
        " (pipeline_parallel x virtual_pipeline).",
        "Choose two settings whose product divides the number of layers.",
    )
    need(
        not layout.sequence_parallel or tensor > 1,
        "trainer.megatron.sequence_parallel needs tensor parallelism.",
        "Set trainer.megatron.tensor_parallel to at least 2, or sequence_parallel to false.",
    )
    engine = "trainer.megatron.transformer_engine"
    for holds, problem, hint in (
        (
            config.compute_dtype != "float32" and config.device != "cpu",
            "computes in bfloat16 on CUDA devices: its attention has no float32 for packed sequences.",
            "Set trainer.compute_dtype and trainer.device to auto, or",
        ),
        (context == 1, "attends within a rank only.", "Set trainer.megatron.context_parallel to 1, or"),
        (
            not (model.gpt_oss or model.delta or model.output_norms),
            "has never computed sinks, linear attention, or norms after a layer, which this model has.",
            "Set",
        ),
    ):
        need(not layout.transformer_engine or holds, f"{engine} {problem}", f"{hint} {engine} to false.")
    need(
        not layout.overlap_param_gather or (layout.distributed_optimizer and layout.overlap_grad_reduce),
        "trainer.megatron.overlap_param_gather needs distributed_optimizer, without which no parameters are gathered, and"
        " overlap_grad_reduce, in whose buckets they are.",
        "Set both to true, or overlap_param_gather to false.",
    )
    need(
        not config.router_replay or model.experts > 0,
        "algorithm.router_replay is true, but the model has no experts.",
        "Set algorithm.router_replay to false.",
    )
    if not model.experts:
        need(
            expert == 1,
            f"trainer.megatron.expert_parallel={expert}, but the model has no experts.",
            "Set trainer.megatron.expert_parallel to 1.",
        )
        need(
            not layout.grouped_gemm,
            "trainer.megatron.grouped_gemm is true, but the model has no experts.",
            "Set trainer.megatron.grouped_gemm to false.",
        )
        return
    need(
        not layout.grouped_gemm or not model.gpt_oss,
        "trainer.megatron.grouped_gemm is true, but the model's experts have biases.",
        "Set trainer.megatron.grouped_gemm to false.",
    )
    numbers = 16 // (4 if config.compute_dtype == "float32" or config.device == "cpu" else 2)
    need(
        not layout.grouped_gemm or (model.hidden % numbers, model.expert_intermediate % numbers) == (0, 0),
        f"trainer.megatron.grouped_gemm needs rows of multiples of 16 bytes; the experts' matrices have {model.hidden} and"
        f" {model.expert_intermediate} columns, which would have to be multiples of {numbers}.",
        "Set trainer.megatron.grouped_gemm to false.",
    )
    divides("expert_parallel", expert, model.experts, "experts")
    need(
        (ranks // pipeline) % expert == 0,
        f"trainer.megatron.expert_parallel={expert} does not divide the {ranks // pipeline} ranks of a pipeline stage.",
        "Lower it, or set trainer.ranks to a multiple of pipeline_parallel x expert_parallel.",
    )
    need(
        tensor == 1 or (layout.sequence_parallel and expert % tensor == 0),
        "a model with experts needs sequence_parallel, and an expert_parallel that tensor_parallel divides, when"
        " tensor_parallel is above 1: its experts are not cut by tensor parallelism.",
        f"Set trainer.megatron.sequence_parallel=true and expert_parallel to a multiple of {tensor}, or tensor_parallel=1.",
    )
