"""`ServerFacts`: what a replica needs to know of its model, from the checkpoint and from a running server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ...config import RolloutConfig
from ...contract.http_calls import HttpCalls
from .generation import chunks_of

_DTYPES = {"half": "float16", "float": "float32"}
"""SGLang's other names of dtypes."""
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "dp_size": (1, None),
    "pp_size": (1, None),
    "tokenizer_worker_num": (1, None),
    "disaggregation_mode": ("null", None),
    "speculative_algorithm": (None,),
    "hicache_storage_backend": (None,),
    "preferred_sampling_params": (None,),
    "weight_cache_mode": ("off", None),
}
"""Settings of a server, as ``/server_info`` names them, with the values that this engine was written for. With others, versions
would not replace all weights and caches of the server, or not in the order of the calls, or tokens would be drawn otherwise."""
_PROBE = {"input_ids": [0], "return_logprob": True, "top_logprobs_num": 2}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts, as SGLang has them or will have them."""

    dtype: str
    max_model_len: int
    vocab_size: int
    tied_embeddings: bool
    seeds: bool = False
    """Whether tokens are drawn by seeds."""


def checkpoint_facts(config: RolloutConfig, model_dir: Path) -> ServerFacts:
    """The facts in the configuration of a checkpoint. Raises `ConfigError` if transformers does not know its model."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    try:
        model = AutoConfig.from_pretrained(model_dir)
        text = model.get_text_config()
        vocab_size = int(text.vocab_size)
    except (ValueError, OSError, KeyError, AttributeError) as cause:
        raise ConfigError(
            f"{model_dir} has no configuration of a language model: {cause}.",
            part="rollout",
            hint="model.path is a directory with a causal language model in Hugging Face format.",
        ) from cause
    stored = str(model.dtype or "float32").removeprefix("torch.")
    # As vLLM does. SGLang would take float16 for a checkpoint in float32.
    automatic = "bfloat16" if stored == "float32" else stored
    return ServerFacts(
        automatic if config.dtype == "auto" else config.dtype,
        int(getattr(text, "max_position_embeddings", 0) or config.max_model_len),
        vocab_size,
        bool(getattr(text, "tie_word_embeddings", False)),
    )


async def served_facts(calls: HttpCalls, wanted: ServerFacts, part: str, limit_s: float) -> ServerFacts:
    """The facts of a running server. Raises `ConfigError` for one that this engine cannot drive."""
    info = await calls.get("server_info", limit_s)
    for name, values in _SUPPORTED.items():
        if info.get(name) not in values:
            raise ConfigError(
                f"the server has {name} = {info[name]!r}, which this engine is not written for.",
                part=part,
                peer=calls.url,
                hint=f"Start it with {values[0]!r}.",
            )
    dtype = str(info.get("dtype") or "auto").removeprefix("torch.")
    if dtype == "auto":
        raise ConfigError(
            "the server does not say its dtype.", part=part, peer=calls.url, hint="Start it with --dtype."
        )
    return replace(
        wanted,
        dtype=_DTYPES.get(dtype, dtype),
        max_model_len=int(info["max_req_input_len"]),
        seeds=bool(info.get("enable_deterministic_inference")),
    )


async def check_answers(calls: HttpCalls, part: str) -> None:
    """Raise `ConfigError` if answers have no versions, or log-probabilities without the temperature.

    A token is generated at two temperatures: the second halves the distance between the two best log-probabilities.
    """
    distances = []
    for temperature in (1.0, 2.0):
        parameters = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
        meta: dict[str, Any] = {}
        async for chunk in chunks_of(calls, {**_PROBE, "sampling_params": parameters}):
            if "error" in chunk:
                raise ConfigError(f"the server refuses a prompt: {chunk['error']}.", part=part, peer=calls.url)
            meta = chunk["meta_info"]
        if "weight_versions" not in meta:
            raise ConfigError(
                "this SGLang does not say which weights generated a token.",
                part=part,
                peer=calls.url,
                hint="Use a release whose answers have meta_info.weight_versions, such as 0.5.23.",
            )
        first, second = meta["output_top_logprobs"][0]
        distances.append(first[0] - second[0])
    if distances[1] > 0.75 * distances[0]:  # equal ones are both 0
        raise ConfigError(
            "the server's log-probabilities are those before the temperature.",
            part=part,
            peer=calls.url,
            hint="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB.",
        )
