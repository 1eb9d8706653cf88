"""Arguments of a replica that vLLM would refuse for a model, found in ``config.json``, without vLLM.

vLLM itself refuses more: see `weightlane.rollout.vllm.checked_replica`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ...config import RolloutConfig

_PART = "rollout"
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs")
"""Keys of ``config.json`` in which vLLM finds a model's experts."""


def refuse_arguments(config: RolloutConfig, model_dir: Path) -> None:
    """Raise `ConfigError` for a length or a division between ranks that the model in `model_dir` does not support.

    Says nothing where arguments of vLLM's own change the model (``rollout.extra_engine_args``), and of a ``config.json`` that is
    not read here: vLLM reads both.
    """
    extra = config.extra_engine_args
    if "hf_overrides" in extra or "model" in extra:
        return
    try:
        hf_config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        model = hf_config.get("text_config") or hf_config
        ranks = int(extra.get("tensor_parallel_size", config.tensor_parallel))
        length = int(extra.get("max_model_len", config.max_model_len) or 0)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return
    if not isinstance(model, Mapping):
        return
    heads = model.get("num_attention_heads")
    if isinstance(heads, int) and heads and heads % ranks:
        possible = [str(number) for number in range(1, heads + 1) if heads % number == 0]
        raise ConfigError(
            f"rollout.tensor_parallel = {ranks} does not divide the model's {heads} attention heads.",
            part=_PART,
            hint=f"Possible here: {', '.join(possible)}.",
        )
    if config.expert_parallel and not any(model.get(key) for key in _EXPERTS):
        raise ConfigError(
            "rollout.expert_parallel is true, and the model has no experts.", part=_PART, hint="Leave it out."
        )
    longest = _longest(model)
    if longest is not None and length > max(longest, int(hf_config.get("model_max_length") or 0)):
        raise ConfigError(
            f"rollout.max_model_len is {length}, and the model has {longest} positions (max_position_embeddings).",
            part=_PART,
            hint=f"Set rollout.max_model_len to at most {longest}.",
        )


def _longest(model: Mapping[str, Any]) -> int | None:
    """The most positions that vLLM allows; None where it scales them, by rules of its own, or is set to allow any number."""
    found = model.get("max_position_embeddings")
    if not isinstance(found, int) or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") not in ("", "0"):
        return None
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    plain = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) == "default"
    return found if plain and not any(isinstance(value, Mapping) for value in rope.values()) else None
