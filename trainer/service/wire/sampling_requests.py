"""Sampling requests of the Tinker API, as JSON; see `requests`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from .requests import Identifier, ModelName, Number, Path, Request, refuse

MOST_TOKENS = 2**20
"""Most tokens of a prompt in any request, before its length is compared with the model's limit."""
MOST_TOP = 1024
"""Most probable tokens of a position in any request, before their number is compared with the replicas' limit."""

Token = Annotated[int, Field(ge=0, lt=2**31)]
Top = Annotated[int, Field(ge=0, le=MOST_TOP)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1000)]


class CreateSamplingSessionRequest(Request):
    """``create_sampling_session``: of a checkpoint, or of the base model."""

    session_id: Identifier
    sampling_session_seq_id: Number
    base_model: ModelName | None = None
    model_path: Path | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        if self.base_model is None and self.model_path is None:
            raise ValueError("it has base_model or model_path")
        return self


class JoinSamplingSessionRequest(Request):
    """``join_sampling_session``: a number for one more client of a session."""

    sampling_session_id: Identifier


class EncodedTextChunk(Request):
    """A part of a prompt. Images and audio are not offered."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token] = Field(max_length=MOST_TOKENS)


class ModelInput(Request):
    """A prompt."""

    chunks: list[EncodedTextChunk] = Field(max_length=10_000)

    @property
    def tokens(self) -> list[int]:
        """The tokens of all chunks."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        count = sum(len(chunk.tokens) for chunk in self.chunks)
        if not 1 <= count <= MOST_TOKENS:
            raise ValueError(f"it has {count} tokens; from 1 to {MOST_TOKENS} are allowed")
        return self


class SamplingParams(Request):
    """How tokens are drawn."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """None: as many as the model has room for."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=64)]
        | Annotated[list[Token], Field(max_length=1024)]
        | None
    ) = None
    """None: the model's own stop tokens. An empty list: no token ends the text."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    """-1: no limit."""
    top_p: float = Field(default=1.0, gt=0, le=1)

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end a sample."""
        if isinstance(self.stop, str):
            return [self.stop]
        return [each for each in self.stop or [] if isinstance(each, str)]

    @property
    def stop_tokens(self) -> list[int] | None:
        """Tokens that end a sample; None for the model's own, which stop strings leave as they are."""
        if self.stop is None or self.stop_strings:
            return None
        return [each for each in self.stop if isinstance(each, int)]

    def seed_of(self, sample: int) -> int | None:
        """The seed of sample number `sample`, from 0 to ``2**63 - 2``; None if the client gave none.

        Seed and number are hashed. If they were added, the samples of neighbouring seeds would be the same but for one each.
        """
        if self.seed is None or not sample:
            return None if self.seed is None else self.seed % (2**63 - 1)
        mixed = hashlib.blake2b(f"{self.seed}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(mixed, "little") % (2**63 - 1)


class SampleRequest(Request):
    """``asample``: in a sampling session, or of a model that the request itself names."""

    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: ModelName | None = None
    model_path: Path | None = None
    sampling_session_id: Identifier | None = None
    seq_id: Number | None = None
    """The request's number in its session: a repeated one is the same request."""
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    prompt_logprobs_last_n: int | None = None
    """Number of prompt tokens at the end that get log-probabilities; None: all."""
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _offered(self) -> Self:
        refuse(self.target_prompt_logprobs is not None, "target_prompt_logprobs")
        refuse(self.prompt_alt_tokens_k != 0, "prompt_alt_tokens_k")
        refuse(bool(self.record_stability_info), "record_stability_info")
        if (self.sampling_session_id is None) != (self.seq_id is None):
            raise ValueError("sampling_session_id and seq_id come together")
        if self.sampling_session_id is None and self.base_model is None and self.model_path is None:
            raise ValueError("it has sampling_session_id, model_path or base_model")
        last, length = self.prompt_logprobs_last_n, len(self.prompt.tokens)
        if last is not None and not (self.prompt_logprobs and 1 <= last < length):
            raise ValueError("prompt_logprobs_last_n needs prompt_logprobs, and is from 1 to the prompt's length - 1")
        return self
