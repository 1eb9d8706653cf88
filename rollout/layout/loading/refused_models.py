"""Models and vLLM configurations that are refused, since their weights could not be replaced correctly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.quantised import quantization_config

_PART = "rollout model"
_DRAFTS_WITHOUT_WEIGHTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Methods of speculative decoding that use the text only."""
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", "block_configs")
"""Keys of ``config.json`` in which vLLM finds a model's experts."""


def refuse_unsupported(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
    """Raise `ConfigError` for a model whose weights could not be replaced correctly.

    Wrong weights would otherwise go unnoticed: they have the right shapes and generate fluent garbage.
    """
    refuse_configuration(vllm_config)
    if device.type == "cpu":
        from ...vllm_cpu.experts import computes_from_parameters  # noqa: PLC0415 - registers an operator
        from ...vllm_surface import RoutedExperts  # noqa: PLC0415 - only in a vLLM worker

        packed = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts) and not computes_from_parameters(layer)
        ]
        if packed:
            raise ConfigError(
                f"mixture-of-experts layers ({packed[0]} and {len(packed) - 1} more) are quantised. vLLM on CPU repacks such"
                " layers, and would not do so again after a commit.",
                part=_PART,
                hint="Use an unquantised checkpoint on CPU, or a GPU.",
            )


def refuse_configuration(vllm_config: Any) -> None:
    """`refuse_unsupported`, as far as it follows from the configuration of the replica."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size or parallel.data_parallel_size > 1:
        raise ConfigError(
            "replicas with pipeline, data or prefill context parallelism are not supported.",
            part=_PART,
            hint="Use tensor_parallel and replicas.",
        )
    _refuse_modes(vllm_config)
    refuse_other_formats(vllm_config.model_config)


def _refuse_modes(vllm_config: Any) -> None:
    """Refuse modes in which vLLM would keep old weights, or move them."""
    draft = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(draft, "method", "") or "")
    why = ""
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        why = (
            "expert load balancing (enable_eplb) takes no versions: it moves experts between ranks and places, and versions"
            " would be written where they were at the start"
        )
    elif draft is not None and method not in _DRAFTS_WITHOUT_WEIGHTS:
        why = f"a draft model (speculative_config, {method}) takes no versions: it would keep those of the start"
    if why:
        raise ConfigError(f"a replica with {why}.", part=_PART, hint="Start vLLM without it.")


def refuse_other_versions(vllm_config: Any, *, adapter: bool) -> None:
    """Raise `ConfigError` unless the replica takes versions of the kind that a connect call is about: adapters, or weights."""
    enabled = getattr(vllm_config, "lora_config", None) is not None
    if enabled and not adapter:
        raise ConfigError(
            "a replica with LoRA adapters (enable_lora) takes no versions of weights: adapters stay as they are while the weights"
            " change under them.",
            part=_PART,
            hint="Start vLLM without it.",
        )
    if adapter and not enabled:
        raise ConfigError(
            "versions are adapters (trainer.lora.publish), and this replica has no slots for them.",
            part=_PART,
            hint="Set rollout.adapter when the replica is made, or publish merged weights.",
        )


def refuse_other_formats(model_config: Any) -> None:
    """Raise `ConfigError` for a model that is quantised in another format than versions."""
    if model_config.quantization is None:
        return
    found = getattr(model_config.hf_config, "quantization_config", None)
    if not _is_fp8_by_blocks(found if isinstance(found, Mapping) else {}):
        raise ConfigError(
            f"the replica quantizes its weights ({model_config.quantization}) in a format in which versions are not sent.",
            part=_PART,
            hint="Start it from an unquantized checkpoint, or from one in fp8 with weight_block_size [128, 128].",
        )


def refuse_in_place(model_config: Any) -> None:
    """Raise `ConfigError` for a quantised model: its layers process all their tensors at once."""
    if model_config.quantization is not None:
        raise ConfigError(
            f"the replica quantizes its weights ({model_config.quantization}), which cannot be written bucket by bucket.",
            part=_PART,
            hint='Set rollout.commit to "staged".',
        )


def has_experts(model: Mapping[str, Any]) -> bool:
    """Whether a section of ``config.json`` names several experts. A list has a number, or a section, for each layer."""
    values = [model.get(key) for key in _EXPERTS]
    found = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return any(has_experts(each) if isinstance(each, Mapping) else isinstance(each, int) and each > 1 for each in found)


def refuse_indivisible(vllm_config: Any, *, part: str) -> None:
    """Raise `ConfigError`, from `part`, for experts that vLLM would only refuse later, in the replica's own processes."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    ranks, experts = parallel.tensor_parallel_size, model.get_num_experts()
    if not experts:
        return
    if ranks > experts:
        raise ConfigError(
            f"{experts} experts cannot be divided between {ranks} ranks.",
            part=part,
            hint=f"Set rollout.tensor_parallel (--tp) to at most {experts}.",
        )
    inner = getattr(model.hf_text_config, "moe_intermediate_size", None)
    if not parallel.enable_expert_parallel and isinstance(inner, int) and inner % ranks:
        raise ConfigError(
            f"experts with {inner} hidden units cannot each be divided between {ranks} ranks.",
            part=part,
            hint="Set rollout.expert_parallel (--ep), which gives every rank some complete experts.",
        )


def refusal_by_vllm(cause: BaseException, action: str, *, part: str, hint: str = "") -> ConfigError:
    """A `ConfigError` that says why vLLM cannot do `action`, with a hint for known causes and else with `hint`."""
    text = str(cause).lower()
    if "expert parallelism" in text or "number of experts" in text:
        hint = "The model has no experts: leave rollout.expert_parallel (--ep) off."
    elif "divisible by tensor parallel size" in text:
        hint = "Set rollout.tensor_parallel (--tp) to a number that divides the model's heads."
    return ConfigError(f"vLLM cannot {action}: {first_line(cause)}", part=part, hint=hint)


def first_line(cause: BaseException) -> str:
    """The first informative line of an error's text, without pydantic's frame."""
    if isinstance(cause, ValidationError):
        first = cause.errors()[0]
        where, said = ".".join(map(str, first["loc"])), str(first["msg"]).removeprefix("Value error, ")
        cause = ValueError(f"{where}: {said}" if where else said)
    lines = [line.strip() for line in str(cause).splitlines()]
    informative = [line for line in lines if line]
    return (informative or [type(cause).__name__])[0].rstrip(".") + "."


def _is_fp8_by_blocks(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's ``quantization_config`` is that of versions with ``sync.quantise = "fp8"``."""
    wanted = quantization_config([])
    return all(config.get(key) == wanted[key] for key in ("quant_method", "activation_scheme", "weight_block_size"))
