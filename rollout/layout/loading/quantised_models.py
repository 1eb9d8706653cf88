"""Which quantised models take versions: those whose checkpoints have the names and shapes in which versions travel quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.quantised import Scheme, quantization_config

_PART = "rollout model"


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Which `sync.quantise` makes the tensors of a checkpoint with this ``quantization_config``; None if none does."""
    fp8, int8 = quantization_config("fp8", []), quantization_config("int8", [])
    if config.get("quant_method") == fp8["quant_method"]:
        alike = all(config.get(key) == fp8[key] for key in ("activation_scheme", "weight_block_size"))
        return "fp8" if alike else None
    if config.get("quant_method") == int8["quant_method"]:
        groups = config.get("config_groups") or {}
        wanted = int8["config_groups"]["group_0"]
        alike = bool(groups) and all(
            _has(group.get(part), wanted[part])
            for group in groups.values()
            for part in ("weights", "input_activations")
        )
        return "int8" if alike else None
    return None


def refuse_other_formats(model_config: Any) -> None:
    """Raise `ConfigError` for a model that is quantised otherwise than versions are."""
    if model_config.quantization is None:
        return
    found = getattr(model_config.hf_config, "quantization_config", None)
    plain = found if isinstance(found, Mapping) else {}
    if scheme_of(plain) is None:
        raise ConfigError(
            f"the replica quantizes its weights ({model_config.quantization}) in a format in which versions are not sent.",
            part=_PART,
            hint="Start it from an unquantized checkpoint, from one in fp8 with weight_block_size [128, 128], or from one in int8"
            " by channel (compressed-tensors).",
        )


def refuse_in_place(model_config: Any) -> None:
    """Raise `ConfigError` for a quantised model: what a layer computes with is made of all its tensors at once."""
    if model_config.quantization is not None:
        raise ConfigError(
            f"the replica quantizes its weights ({model_config.quantization}), which cannot be exchanged piece by piece.",
            part=_PART,
            hint='Set rollout.commit to "staged".',
        )


def _has(found: Any, wanted: Mapping[str, Any]) -> bool:
    return isinstance(found, Mapping) and all(found.get(key) == value for key, value in wanted.items())
