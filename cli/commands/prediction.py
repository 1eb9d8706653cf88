"""Predicts memory and time of a run on GPUs that need not be here, from the model's shape and the GPUs' data sheets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.sync import dtype_of
from weightlane.trainer.algorithms.composition import role_names
from weightlane.trainer.algorithms.roles import CRITIC, REFERENCE
from weightlane.trainer.dispatch.role_spec import POLICY_GROUP
from weightlane.trainer.engines.hf.model_dir import weight_headers

from ..config.run_config import RunConfig
from ..run.resources import OVERHEAD_BYTES, Machines, Sizes

_PART = "resources"
_GB = 1e9
_TRAINING_SHARE = 0.35
"""Share of a GPU's arithmetic that training reaches: FSDP2 with packed sequences, without kernels made for one model."""
_DECODING_SHARE = 0.6
"""Share of a GPU's memory bandwidth that decoding reaches."""
_SAVED_BYTES = 10
"""Bytes that a decoder layer saves for backward, for each token and each feature of its hidden, query, key, value, attention and
MLP states: counted on Qwen3 layers in bfloat16, as autograd saves them."""
_EXPERTS = re.compile(r"\.experts\.")
_TWO_DIGITS, _MINUTE, _HOUR = 10, 60, 3600


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its maker's data sheet."""

    memory_bytes: int
    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""


GPUS = {
    "a100": Gpu(80 * 10**9, 312e12, 2039e9),
    "h100": Gpu(80 * 10**9, 989e12, 3350e9),
    "h200": Gpu(141 * 10**9, 989e12, 4800e9),
    "l40s": Gpu(48 * 10**9, 362e12, 864e9),
    "rtx4090": Gpu(24 * 10**9, 165e12, 1008e9),
}
"""By the name that ``weightlane check --on`` takes. A100 and H100 are the SXM versions of 80 GB."""


def gpus_named(text: str) -> tuple[Machines, Gpu]:
    """Return the machines and the GPU that `text` names, e.g. ``"8xh100"``. Raises `ConfigError` for anything else."""
    match = re.fullmatch(r"([1-9]\d{0,5})x(\w+)", text.lower())
    if match is None or match[2] not in GPUS:
        raise ConfigError(
            f"{text!r} names no GPUs.",
            part=_PART,
            hint=f"Say how many of which: 8xh100. Known: {', '.join(GPUS)}.",
        )
    gpu = GPUS[match[2]]
    return Machines(int(match[1]), gpu.memory_bytes, serves_on_gpus=True), gpu


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a token costs in a model."""

    layers: int
    hidden: int
    saved_features: int
    """Features per token and layer that backward needs."""
    cached_features: int
    """Features per token of the key-value cache, all layers."""
    cache_parts: int
    """Most tensor parallel ranks that share the cache without a copy."""
    in_experts: int
    """Parameters of routed experts."""
    active: float
    """Parameters that compute a token: of routed experts, the chosen ones."""

    @classmethod
    def of(cls, text: Any, elements: Mapping[str, int]) -> ModelCost:
        """Take the shape from `text`, transformers' configuration of the text model, and the `elements` of each tensor.

        Raises `ConfigError` if the configuration does not have the shape of a transformer.
        """

        def number(*keys: str) -> int:
            return next((int(value) for key in keys if (value := getattr(text, key, None)) is not None), 0)

        layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
        if not (layers and hidden and heads):
            raise ConfigError(
                f"memory and time are not predicted for {text.model_type}: its configuration has no layers of attention.",
                part=_PART,
                hint="Leave out --on.",
            )
        groups, width = number("num_key_value_heads") or heads, number("head_dim") or hidden // heads
        experts, chosen = number("num_local_experts", "num_experts", "n_routed_experts"), number("num_experts_per_tok")
        wide = number("moe_intermediate_size", "intermediate_size") * max(1, chosen) or 4 * hidden
        latent, rotary = number("kv_lora_rank"), number("qk_rope_head_dim")
        if latent:
            cached, parts = latent + rotary, 1
            attended = 2 * heads * (number("qk_nope_head_dim") + rotary + number("v_head_dim"))
        else:
            cached, parts, attended = 2 * groups * width, groups, 2 * (heads + groups) * width
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
        in_experts = sum(count for name, count in elements.items() if _EXPERTS.search(name)) if experts else 0
        active = sum(elements.values()) - in_experts * (1 - chosen / max(1, experts))
        cached *= sum(kind != "linear_attention" for kind in kinds)
        return cls(layers, hidden, hidden + wide + attended, cached, parts, in_experts, active)

    def activation_bytes(self, tokens: int, *, recomputed: bool) -> int:
        """Bytes that a pass over `tokens` keeps for backward. With `recomputed`, layers keep their input, and one the rest."""
        one = _SAVED_BYTES * self.saved_features * tokens
        return one + 2 * self.hidden * self.layers * tokens if recomputed else one * self.layers


def elements_of(model_dir: Any) -> dict[str, int]:
    """Return the number of elements of each tensor in `model_dir`, a directory with a complete model."""
    return {
        name: math.prod(item["shape"]) for header in weight_headers(model_dir).values() for name, item in header.items()
    }


def predicted(
    config: RunConfig, model: ModelCost, dtype: str, sizes: Sizes, gpu: Gpu, prompt_tokens: float
) -> dict[str, str]:
    """Return name and amount of the memory and time of a run of the `fitted` configuration, on GPUs like `gpu`.

    Every completion counts as one of ``algorithm.max_new_tokens`` tokens. The checkpoint has `dtype`, and `prompt_tokens` is the
    mean length of prompts.

    Raises `ConfigError` if a trainer rank does not fit into its part of a GPU, or if a side is not on GPUs in bfloat16.
    """
    trainer, rollout, algorithm = config.trainer, config.rollout, config.algorithm
    if not trainer.gpus_per_rank or not rollout.gpus_per_rank or trainer.compute_dtype == "float32":
        raise ConfigError(
            "memory and time are predicted for trainer and rollouts on GPUs, in bfloat16.",
            part=_PART,
            hint="Leave out trainer.device, trainer.compute_dtype and gpus_per_rank of 0, or --on.",
        )
    if rollout.sizes:
        raise ConfigError(
            "time is predicted for replicas of one size.", part=_PART, hint="Leave out rollout.sizes, or --on."
        )
    served, cache = _served(config, sizes, gpu)
    shares_gpu = trainer.gpus_per_rank < 1
    memory = _trainer_memory(config, model, sizes, gpu, served if shares_gpu else 0)
    # Of a batch. The prompt of a group is computed once.
    groups, longest, ranks = algorithm.prompts_per_step, algorithm.max_new_tokens, rollout.tensor_parallel
    requests = groups * algorithm.group_size
    computes = dtype if rollout.dtype == "auto" else rollout.dtype
    per_token = model.cached_features * dtype_of(computes).itemsize / min(ranks, model.cache_parts)
    one = per_token * (prompt_tokens + longest / 2)
    at_once = min(
        rollout.max_num_seqs, rollout.concurrency, -(-requests // rollout.replicas), int(cache / max(1.0, one))
    )
    at_once = max(1, at_once)
    rounds = max(1.0, requests / (rollout.replicas * at_once))
    reading = (sizes.share + at_once * one) / gpu.bandwidth
    computing = 2 * model.active * at_once / (ranks * gpu.flops)
    generation = rounds * longest * max(reading, computing) / _DECODING_SHARE
    training = max(
        operations * model.active / (group.ranks * gpu.flops * _TRAINING_SHARE)
        for group, operations in _training_operations(config, requests * longest, prompt_tokens)
    )
    in_turns = trainer.colocate or shares_gpu or not config.loop.max_staleness
    step = generation + training if in_turns else max(generation, training)
    order = "one after the other" if in_turns else "at the same time"
    episodes = ", episodes of one reply" if config.environment.name else ""
    return {
        **memory,
        "memory of a rollout rank": (
            f"{served / _GB:.1f} of {gpu.memory_bytes / _GB:.0f} GB: model {sizes.share / _GB:.1f}, cache {cache / _GB:.1f};"
            f" {at_once} requests at once"
        ),
        "time of a step": (
            f"{_duration(step)}: generation {_duration(generation)}, training {_duration(training)}, {order}"
        ),
        "time of the run": f"{_duration(step * config.loop.steps)} for {config.loop.steps} steps, without evaluations",
        "predicted from": (
            f"data sheets, {_TRAINING_SHARE:.0%} of arithmetic in training, {_DECODING_SHARE:.0%} of bandwidth in generation,"
            f" prompts of {prompt_tokens:.0f} and completions of {longest} tokens{episodes}; not measured"
        ),
    }


def _served(config: RunConfig, sizes: Sizes, gpu: Gpu) -> tuple[int, int]:
    """Return the bytes of a GPU that vLLM takes, and those of its cache."""
    fixed = config.rollout.kv_cache_memory_bytes
    if fixed is not None:
        return sizes.share + OVERHEAD_BYTES + fixed, fixed
    served = int((config.rollout.gpu_memory_utilization or 0) * gpu.memory_bytes)
    return served, max(0, served - sizes.share - OVERHEAD_BYTES)


def _trainer_memory(config: RunConfig, model: ModelCost, sizes: Sizes, gpu: Gpu, served: int) -> dict[str, str]:
    """Return the memory of a rank of each group. Raises `ConfigError` if it does not fit beside the `served` bytes of vLLM."""
    found = {}
    devices = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend).capabilities.devices
    for name, group in config.rank_groups.items():
        mine = name == POLICY_GROUP
        snapshot = sizes.version // group.ranks if mine and "cuda" in devices else 0
        state = int((sizes.trained if mine else sizes.own[name]) * _repeated(group, model, sizes))
        activations = model.activation_bytes(group.micro_batch_tokens, recomputed=group.activation_checkpointing)
        needed = state + activations + snapshot + OVERHEAD_BYTES
        free = gpu.memory_bytes - (served + (config.rollout.staging_limit_bytes or 0) if served and mine else 0)
        parts = (
            f"state {state / _GB:.1f}, activations of {group.micro_batch_tokens} tokens {activations / _GB:.1f}, snapshot"
            f" {snapshot / _GB:.1f}, libraries {OVERHEAD_BYTES / _GB:.1f}"
        )
        if needed > free:
            raise ConfigError(
                f"a rank of {name} needs about {needed / _GB:.1f} GB ({parts}), and has {free / _GB:.1f} GB of a GPU.",
                part=_PART,
                hint=f"Lower {name}.micro_batch_tokens, set {name}.activation_checkpointing, or raise {name}.ranks"
                + (", or lower rollout.gpu_memory_utilization." if served else "."),
            )
        found[f"memory of a rank of {name}"] = f"{needed / _GB:.1f} of {gpu.memory_bytes / _GB:.0f} GB: {parts}"
    return found


def _repeated(group: Any, model: ModelCost, sizes: Sizes) -> float:
    """Return how many times the state of a rank is larger than if it were split over all ranks, as FSDP2 splits it."""
    layout = group.megatron
    if group.engine != "megatron":
        return 1.0
    dense = (sizes.parameters - model.in_experts) / (layout.tensor_parallel * layout.pipeline_parallel)
    held = dense + model.in_experts / (layout.pipeline_parallel * layout.expert_parallel)
    repeated = float(held * group.ranks / sizes.parameters)
    # With the distributed optimizer, master weights and moments, 12 bytes of 16, are split over the copies.
    return 0.75 + 0.25 * repeated if layout.distributed_optimizer else repeated


def _training_operations(config: RunConfig, written: int, prompt_tokens: float) -> list[tuple[Any, float]]:
    """Return each group of ranks, with its operations per parameter for a batch with `written` tokens of completions."""
    algorithm, groups = config.algorithm, config.rank_groups
    policy = groups[POLICY_GROUP]
    sharing = {"fsdp2": policy.fsdp2.shared_prefixes, "megatron": policy.megatron.shares_prefixes}
    shared = sharing.get(policy.engine, False)
    prompts = algorithm.prompts_per_step * (1 if shared else algorithm.group_size)
    tokens = written + prompts * prompt_tokens
    roles, operations = role_names(algorithm), dict.fromkeys(groups, 0.0)

    def add(role: str, per_token: float) -> None:
        operations[role if role in operations else POLICY_GROUP] += per_token * tokens

    recomputed = 2 * policy.activation_checkpointing
    # Forward 2, gradients of activations 2, and of weights 2, which are not computed beside an adapter.
    add(
        POLICY_GROUP,
        algorithm.epochs * ((4 if policy.lora else 6) + recomputed) + 2 * (algorithm.proximal == "trainer"),
    )
    if REFERENCE in roles:
        add(REFERENCE, 2)
    if CRITIC in roles:
        add(CRITIC, 2 + algorithm.epochs * (6 + recomputed))
    return [(groups[name], count) for name, count in operations.items()]


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.2g} s" if seconds < _TWO_DIGITS else f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
