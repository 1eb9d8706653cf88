"""Predicts memory and time of a run on GPUs that need not be here, from the model's shape and the GPUs' data sheets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import dtype_of
from weightlane.trainer.algorithms.composition import role_names
from weightlane.trainer.algorithms.roles import REFERENCE
from weightlane.trainer.engines.hf.model_dir import ModelInfo

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
class _Shape:
    """What a token costs in the model."""

    layers: int
    hidden: int
    saved_features: int
    """Features per token and layer that backward needs."""
    cache_bytes: int
    """Bytes per token of the key-value cache, all layers."""
    active: float
    """Parameters that compute a token: of experts, the chosen ones."""

    @classmethod
    def of(cls, model: ModelInfo, parameters: int, dtype: str) -> _Shape:
        text: Mapping[str, Any] = model.config.get("text_config") or model.config

        def number(*keys: str) -> int:
            return next((int(text[key]) for key in keys if text.get(key) is not None), 0)

        layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
        groups = number("num_key_value_heads") or heads
        width = number("head_dim") or hidden // heads
        experts, chosen = number("num_local_experts", "num_experts", "n_routed_experts"), number("num_experts_per_tok")
        wide = number("moe_intermediate_size", "intermediate_size")
        latent = number("kv_lora_rank")
        cached = latent + number("qk_rope_head_dim") if latent else 2 * groups * width
        in_experts = 3 * layers * experts * hidden * wide
        active = parameters - in_experts * (1 - chosen / experts) if experts else parameters
        features = hidden + wide * max(1, chosen) + 2 * (heads + groups) * width
        return cls(layers, hidden, features, cached * layers * dtype_of(dtype).itemsize, max(active, 1.0))

    def activation_bytes(self, tokens: int, *, recomputed: bool) -> int:
        """Bytes that a pass over `tokens` keeps for backward. With `recomputed`, layers keep their input, and one the rest."""
        one = _SAVED_BYTES * self.saved_features * tokens
        return one + 2 * self.hidden * self.layers * tokens if recomputed else one * self.layers


def predicted(config: RunConfig, model: ModelInfo, sizes: Sizes, gpu: Gpu, prompt_tokens: float) -> dict[str, str]:
    """Return name and amount of the memory and time of a run of the `fitted` configuration, on GPUs like `gpu`.

    Every completion counts as one of ``algorithm.max_new_tokens`` tokens, and `prompt_tokens` is the mean length of prompts.

    Raises `ConfigError` if a trainer rank does not fit into its part of a GPU.
    """
    trainer, rollout, algorithm = config.trainer, config.rollout, config.algorithm
    dtype = next(name for name in (rollout.dtype, model.dtype) if name != "auto")
    shape = _Shape.of(model, sizes.parameters, dtype)
    # Of the trainer.
    activations = shape.activation_bytes(trainer.micro_batch_tokens, recomputed=trainer.activation_checkpointing)
    needed = sizes.trained + activations + OVERHEAD_BYTES
    served = int((rollout.gpu_memory_utilization or 0) * gpu.memory_bytes)
    shares_gpu = 0 < (trainer.gpus_per_rank or 0) < 1
    free = gpu.memory_bytes - (served + (rollout.staging_limit_bytes or 0) if shares_gpu else 0)
    if needed > free:
        raise ConfigError(
            f"a trainer rank needs about {needed / _GB:.1f} GB ({sizes.trained / _GB:.1f} of state, {activations / _GB:.1f} of"
            f" activations, {OVERHEAD_BYTES / _GB:.1f} of libraries), and has {free / _GB:.1f} GB of a GPU.",
            part=_PART,
            hint="Lower trainer.micro_batch_tokens, set trainer.activation_checkpointing, or raise trainer.ranks"
            + (", or lower rollout.gpu_memory_utilization." if shares_gpu else "."),
        )
    cache = max(0, served - sizes.share - OVERHEAD_BYTES)
    # Of a batch. The prompt of a group is computed once.
    groups, longest = algorithm.prompts_per_step, algorithm.max_new_tokens
    requests = groups * algorithm.group_size
    length = prompt_tokens + longest / 2
    fitting = int(cache / max(1.0, shape.cache_bytes * length / rollout.tensor_parallel))
    at_once = max(1, min(rollout.max_num_seqs, rollout.concurrency, -(-requests // rollout.replicas), fitting))
    rounds = max(1.0, requests / (rollout.replicas * at_once))
    read = sizes.share + at_once * shape.cache_bytes * length / rollout.tensor_parallel
    decoding = max(
        read / (gpu.bandwidth * _DECODING_SHARE),
        2 * shape.active * at_once / (rollout.tensor_parallel * gpu.flops * _DECODING_SHARE),
    )
    generation = rounds * longest * decoding
    shared = trainer.engine == "fsdp2" and trainer.fsdp2.shared_prefixes
    tokens = requests * longest + (groups if shared else requests) * prompt_tokens
    passes = 6 + 2 * trainer.activation_checkpointing  # forward 2, backward 4
    passes *= algorithm.epochs
    passes += 2 * (algorithm.proximal == "trainer") + 2 * (REFERENCE in role_names(algorithm))
    training = passes * shape.active * tokens / (trainer.ranks * gpu.flops * _TRAINING_SHARE)
    in_turns = trainer.colocate or shares_gpu or not config.loop.max_staleness
    step = generation + training if in_turns else max(generation, training)
    order = "one after the other" if in_turns else "at the same time"
    return {
        "memory of a trainer rank": (
            f"{needed / _GB:.1f} of {gpu.memory_bytes / _GB:.0f} GB: state {sizes.trained / _GB:.1f}, activations of"
            f" {trainer.micro_batch_tokens} tokens {activations / _GB:.1f}, libraries {OVERHEAD_BYTES / _GB:.1f}"
        ),
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
            f" prompts of {prompt_tokens:.0f} and completions of {longest} tokens; not measured"
        ),
    }


def _duration(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.2g} s" if seconds < _TWO_DIGITS else f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
