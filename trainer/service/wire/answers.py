"""Answers that carry tensors: outputs of a pass, and samples, as Protocol Buffers in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from weightlane.ckpt_engines import ProtocolError

from .messages import (
    DTYPE_FLOAT32,
    STOP_REASON_LENGTH,
    STOP_REASON_STOP,
    ForwardBackwardOutput,
    SampleResponse,
)

OUTPUT_TYPE = "ArrayRecord"
"""The record type in which the SDK expects the outputs of sequences."""
LOGPROBS = "logprobs"
NO_LOGPROB = -99999.0
"""The log-probability, with token 0, of an empty place in a list of most probable tokens."""

_PART = "answer"

TopTokens = Sequence[tuple[int, float]] | None
"""The most probable tokens of one position with their log-probabilities, likeliest first; None where there are none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated sequence."""

    tokens: Sequence[int]
    """Generated tokens, the stop token included."""
    logprobs: Sequence[float] | None
    """Log-probability of each token; None if not requested."""
    stop_reason: Literal["stop", "length"]
    top: Sequence[TopTokens] | None = None
    """The most probable tokens at the position of each token; None if not requested."""


def pass_answer(
    logprobs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], metrics: Mapping[str, float]
) -> bytes:
    """The answer to a forward pass, or a forward and a backward one: a ``ForwardBackwardOutput``.

    It has the float32 `logprobs` of each sequence's targets, in one record for neighbours with as many labels.

    Args:
        logprobs: [N] for each sequence in the order of the request, or [N, K] where the batch was padded to K labels.
        shapes: `TrainRequest.shapes`: the shape to which each is cut.
        metrics: What `training_metrics` returns.

    Raises:
        ProtocolError: The numbers of outputs and shapes differ, or an output is smaller than its shape.
    """
    if len(logprobs) != len(shapes):
        raise ProtocolError(f"{len(logprobs)} outputs of {len(shapes)} sequences.", part=_PART)
    message = ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in metrics.items():
        message.metrics[name] = value
    for labels, group in groupby(zip(logprobs, shapes, strict=True), key=lambda pair: pair[1][1:]):
        matrices = [_matrix(found, shape) for found, shape in group]
        record = message.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(matrices))
        field = record.fields[LOGPROBS]
        field.dtype = DTYPE_FLOAT32
        field.trailing_shape.extend(labels)
        # All at once: to convert them one by one would take longer than the rest of the answer.
        values = torch.cat(matrices).to("cpu", torch.float32).numpy().astype("<f4", copy=False)
        field.data = values.tobytes()
        field.offsets = np.cumsum([0, *(4 * each.numel() for each in matrices)], dtype="<i8").tobytes()
    written: bytes = message.SerializeToString()
    return written


def training_metrics(report: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a pass, from `LossSums.named` or `loss_report`, under the names that clients expect.

    The SDK splits a batch into several requests and combines their metrics by the ending of each name. All metrics of the
    service's losses are sums.
    """
    return {f"{name.replace(':', '_')}:sum": float(value) for name, value in report.items()}


def sample_answer(
    samples: Sequence[Sample],
    *,
    prompt_logprobs: Sequence[float | None] | None = None,
    prompt_top: Sequence[TopTokens] | None = None,
    top_k: int = 0,
    top_prompt_k: int = 0,
) -> bytes:
    """The answer to a request for samples: a ``SampleResponse``.

    Args:
        samples: The samples.
        prompt_logprobs: Log-probability of each prompt token, None where there is none; None if not requested.
        prompt_top: The most probable tokens at each prompt token; None if not requested.
        top_k: Entries of each `Sample.top`. Shorter lists are padded, longer ones cut.
        top_prompt_k: Entries of each list of `prompt_top`.
    """
    message = SampleResponse()
    for sample in samples:
        stop = STOP_REASON_STOP if sample.stop_reason == "stop" else STOP_REASON_LENGTH
        added = message.sequences.add(stop_reason=stop, tokens=_bytes(sample.tokens, "<i4"))
        if sample.logprobs is not None:
            if len(sample.logprobs) != len(sample.tokens):
                raise ProtocolError(
                    f"{len(sample.logprobs)} log-probabilities of {len(sample.tokens)} tokens.", part=_PART
                )
            added.logprobs = _bytes(sample.logprobs, "<f4")
        if sample.top is not None:
            _write_top(added.topk_sampled_logprobs, sample.top, top_k)
    if prompt_logprobs is not None:
        message.prompt_logprobs = _bytes([np.nan if each is None else each for each in prompt_logprobs], "<f4")
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, prompt_top, top_prompt_k)
    written: bytes = message.SerializeToString()
    return written


def _matrix(found: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[N, K]: the part of a padded output that the client asked for."""
    matrix = found.detach().reshape(found.shape[0], -1)
    labels = shape[1] if len(shape) > 1 else 1
    if matrix.shape[0] != shape[0] or matrix.shape[1] < labels:
        raise ProtocolError(f"an output of shape {list(found.shape)} for targets of shape {list(shape)}.", part=_PART)
    return matrix[:, :labels]


def _bytes(values: Sequence[float], dtype: str) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _write_top(message: Any, rows: Sequence[TopTokens], k: int) -> None:
    """Fill a ``TopkLogprobs``: matrices of `k` columns, row by row."""
    tokens, logprobs = np.zeros((len(rows), k), "<i4"), np.full((len(rows), k), NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        for place, (token, logprob) in enumerate((row or ())[:k]):
            tokens[at, place], logprobs[at, place] = token, logprob
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(rows)
