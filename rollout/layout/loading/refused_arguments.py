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
from .refused_models import has_experts

_PART = "rollout"
_OF_SETTINGS = {
    "model": "model.path",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "enable_return_routed_experts": "algorithm.router_replay",
    "enable_sleep_mode": "trainer.colocate",
    "max_loras": "rollout.adapter_slots",
    "max_cpu_loras": "rollout.adapter_slots",
    "max_lora_rank": "trainer.lora.rank",
    "lora_target_modules": "trainer.lora.targets",
    "weight_transfer_config": "",
    "logprobs_mode": "",
}
"""Arguments of vLLM that weightlane relies on, with the setting that each follows; an empty one if weightlane needs one value."""


def refuse_arguments(config: RolloutConfig, model_dir: Path) -> None:
    """Raise `ConfigError` for a length or a division between ranks that the model in `model_dir` does not support.

    Arguments of vLLM's own (``rollout.extra_engine_args``) that weightlane relies on are refused, too. Says nothing where others
    change the model, and of a ``config.json`` that is not read here: vLLM reads both.
    """
    extra, ranks = config.extra_engine_args, config.tensor_parallel
    refused = [name for name in extra if config.engine == "vllm" and name in _OF_SETTINGS]
    if refused:
        setting = _OF_SETTINGS[refused[0]]
        raise ConfigError(
            f"rollout.extra_engine_args has {refused[0]}, which weightlane sets.",
            part=_PART,
            hint=f"Set {setting} instead." if setting else "Remove it.",
        )
    if "hf_overrides" in extra:
        return
    try:
        hf_config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        model = hf_config.get("text_config") or hf_config
        length = int(extra.get("max_model_len", config.max_model_len) or 0)
        possible_length = int(hf_config.get("model_max_length") or 0)
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
    if config.expert_parallel and not has_experts(model):
        raise ConfigError(
            "rollout.expert_parallel is true, and the model has no experts.", part=_PART, hint="Leave it out."
        )
    longest = _longest(model)
    if longest is not None and length > max(longest, possible_length):
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
