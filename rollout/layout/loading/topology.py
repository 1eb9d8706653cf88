"""How a replica's model is divided between its ranks, and what cannot be divided so."""

from __future__ import annotations

from typing import Any

from weightlane.ckpt_engines import ConfigError


def refuse_division(vllm_config: Any, *, part: str) -> None:
    """Raise `ConfigError` for a mixture of experts that vLLM would refuse only in the replica's own processes.

    Args:
        vllm_config: vLLM's configuration of the replica.
        part: Who asks, for the error.
    """
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
            hint="Set rollout.expert_parallel (--ep), which gives every rank some whole experts.",
        )


def why_not(cause: BaseException) -> str:
    """What a user can do about an error with which vLLM refuses a replica's configuration; empty where that is not known."""
    text = str(cause).lower()
    if "expert parallelism" in text or "number of experts" in text:
        return "The model has no experts: leave rollout.expert_parallel (--ep) off."
    if "divisible by tensor parallel size" in text:
        return "Set rollout.tensor_parallel (--tp) to a number that divides the model's heads."
    return ""


def in_short(cause: BaseException) -> str:
    """The first lines of an error that say something, without pydantic's frame."""
    lines = [line.strip() for line in str(cause).splitlines()]
    told = [line for line in lines if line and "validation error" not in line and not line.startswith("For further")]
    text = (told or [type(cause).__name__])[0].removeprefix("Value error, ")
    return text.partition(" [type=")[0].rstrip(".") + "."
