"""Requests for a forward pass, or a forward and a backward one: parsing of bytes into a batch of token sequences."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from weightlane.ckpt_engines import ProtocolError

from ...data.batch import TokenBatch, unpacked_batch
from ...data.sequences import IGNORED, MicroBatch
from . import tensors
from .bodies import PART, parsed
from .messages import ForwardBackwardRequest
from .names import checked_identifier
from .tensors import Array, integers, tensor

INPUT = "model_input"
TARGETS = "target_tokens"
"""Name of the input with the targets; every other input is a per-token value of the same shape."""
WEIGHTS = "weights"
"""Name of the input that is 1 for a sequence without it if another sequence has it."""

MOST_DATUMS = 1024
"""Most sequences of a request, as the SDK splits batches."""
MOST_TOKENS = 2**17
"""Most tokens of one sequence."""
_INPUT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_INPUTS = 16
"""Most inputs of a sequence: as many as the SDK allows a client-side loss."""
_CONFIG_KEYS = 64
"""Most settings of a loss."""
_SMALL_BYTES = 64 * 2**10
"""Most bytes of a request that is decoded on the event loop, in some ten milliseconds at most, while other clients wait."""
_TEXT_CHARACTERS = 200
"""Most characters of the name of a loss, and of a setting that is text."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The loss and the batch of a `TrainBody`, decoded and checked."""

    loss: str
    loss_config: Mapping[str, float | str]
    batch: TokenBatch
    """The sequences, all with K labels if any has more than one. Targets of weight 0 are targets, too: the client wants their
    log-probabilities. Values are float32 and have the shape of the targets."""
    shapes: tuple[tuple[int, ...], ...]
    """[N] or [N, K] of each sequence's targets, as the client sent them: the shape of its answer."""


@dataclass(frozen=True, slots=True)
class TrainBody:
    """The body of a ``forward_backward`` of which only the address has been read: the model, and the request's number.

    A client gives its next request the next number, whatever is wrong with the rest of this one.
    """

    model_id: str
    seq_id: int
    """The request's number among those of its model, from 1. Requests are carried out in this order."""
    forward_only: bool
    """Whether no gradient is wanted."""
    message: Any
    """The ``ForwardBackwardRequest``."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read the address in a ``ForwardBackwardRequest``. Raises `ProtocolError`, and nothing else."""
        message = parsed(ForwardBackwardRequest, body)
        if message.seq_id < 1:
            raise ProtocolError(
                f"seq_id is {message.seq_id}.", part=PART, hint="Requests of a model are numbered from 1."
            )
        model_id = checked_identifier(message.model_id, part=f"{PART}, model_id")
        return cls(model_id, message.seq_id, message.forward_only, message)

    @property
    def decodes_at_once(self) -> bool:
        """Whether `request` takes only milliseconds: with a busy event loop, a thread would wait longer for its turn."""
        return self.message.ByteSize() <= _SMALL_BYTES and not _sparse_cells(self.message.data)

    def request(self, vocabulary: int) -> TrainRequest:
        """Decode the rest of the body, for a model whose token ids are below `vocabulary`.

        Sequences with different numbers of labels are padded with `IGNORED` targets and zeros to the largest one. Raises
        `ProtocolError`, which names datum and field, and nothing else.
        """
        message = self.message
        if not 1 <= len(message.data) <= MOST_DATUMS:
            raise ProtocolError(
                f"the request has {len(message.data)} datums.",
                part=PART,
                hint=f"Send from 1 to {MOST_DATUMS} at once.",
            )
        if not 1 <= len(message.loss_fn) <= _TEXT_CHARACTERS:
            raise ProtocolError("the request names no loss.", part=PART)
        _check_cells(_sparse_cells(message.data))  # before any sparse tensor is made dense
        datums = [_datum(each, index) for index, each in enumerate(message.data)]
        _check_ids(datums, vocabulary)
        shapes = tuple(tuple(datum.targets.shape) for datum in datums)
        return TrainRequest(message.loss_fn, _config(message), _batch(datums), shapes)


@dataclass(frozen=True, slots=True)
class _Datum:
    tokens: Array
    """int64 [N]."""
    targets: Array
    """int64 [N] or [N, K]."""
    values: dict[str, Array]
    """float32, of the targets' shape."""


def _sparse_cells(data: Sequence[Any]) -> int:
    """Number of entries of all sparse tensors in dense form."""
    every = (each for datum in data for each in datum.loss_fn_inputs.values())
    shapes = [each.shape[:2] for each in every if each.WhichOneof("encoding") == "sparse_csr"]
    return sum(max(0, math.prod(shape)) for shape in shapes)


def _check_cells(cells: int) -> None:
    if cells > tensors.MOST_CELLS:
        raise ProtocolError(
            f"its tensors have {cells} entries when none is sparse and all have as many labels, and {tensors.MOST_CELLS} are"
            " allowed.",
            part=PART,
            hint="Send fewer sequences at once.",
        )


def _datum(message: Any, index: int) -> _Datum:
    part = f"{PART}, datum {index}"
    tokens = _tokens(message.model_input, part=f"{part}, {INPUT}")
    names = sorted(message.loss_fn_inputs)
    if TARGETS not in names:
        raise ProtocolError(f"it has no {TARGETS}.", part=part, hint="Every datum says what its tokens predict.")
    if len(names) > _INPUTS or not all(_INPUT.fullmatch(name) for name in names):
        raise ProtocolError(
            f"its loss_fn_inputs are {', '.join(names)[:200]!r}.",
            part=part,
            hint=f"At most {_INPUTS}, named by letters, digits and underscores.",
        )
    found = {name: tensor(message.loss_fn_inputs[name], part=f"{part}, {name}") for name in names}
    targets = found.pop(TARGETS)
    if len(targets) != len(tokens):
        raise ProtocolError(
            f"shape {list(targets.shape)} beside {len(tokens)} tokens of model_input.",
            part=f"{part}, {TARGETS}",
            hint="Each token of model_input predicts one position of target_tokens.",
        )
    if targets.dtype != np.int64:
        raise ProtocolError("token ids are no integers.", part=f"{part}, {TARGETS}", hint="Send int64.")
    return _Datum(tokens, targets, {name: _value(each, targets, f"{part}, {name}") for name, each in found.items()})


def _tokens(chunks: Sequence[Any], *, part: str) -> Array:
    """int64 [N]: the tokens of all chunks."""
    found = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            raise ProtocolError("a chunk is no encoded text.", part=part, hint="No image or audio is offered.")
        found.append(integers(chunk.encoded_text.tokens, "<i4", part=part))
    count = sum(len(each) for each in found)
    if not 1 <= count <= MOST_TOKENS:
        raise ProtocolError(f"it has {count} tokens.", part=part, hint=f"From 1 to {MOST_TOKENS} are computed.")
    return np.concatenate(found) if len(found) > 1 else found[0]


def _check_ids(datums: Sequence[_Datum], vocabulary: int) -> None:
    """Raise `ProtocolError` for the first token that the model doesn't have. All tokens are checked at once first, for speed."""
    whole = np.concatenate([ids.ravel() for datum in datums for ids in (datum.tokens, datum.targets)])
    if whole.min() >= 0 and whole.max() < vocabulary:
        return
    for index, datum in enumerate(datums):
        for name, ids in ((INPUT, datum.tokens), (TARGETS, datum.targets)):
            for at in np.argwhere((ids < 0) | (ids >= vocabulary)):
                raise ProtocolError(
                    f"token id {int(ids[tuple(at)])} at {', '.join(map(str, at))}.",
                    part=f"{PART}, datum {index}, {name}",
                    hint=f"The model has tokens 0 to {vocabulary - 1}: use its own tokenizer.",
                )


def _value(found: Array, targets: Array, part: str) -> Array:
    """Check a per-token value, and convert it to float32."""
    if found.shape != targets.shape:
        raise ProtocolError(
            f"shape {list(found.shape)} beside {TARGETS} of shape {list(targets.shape)}.",
            part=part,
            hint="Every input has the shape of target_tokens.",
        )
    value = found.astype(np.float32)
    wrong = ~np.isfinite(value)
    if wrong.any():
        at = tuple(int(place) for place in np.argwhere(wrong)[0])
        raise ProtocolError(f"{value[at]} at {', '.join(map(str, at))}.", part=part, hint="Send finite numbers.")
    return value


def _config(message: Any) -> dict[str, float | str]:
    """The settings of the loss. Clients that know their version 2 send it in addition to version 1, which has only numbers."""
    given: dict[str, float | str | None] = dict(message.loss_fn_config)
    if message.loss_fn_config_v2:
        values = message.loss_fn_config_v2
        given = {name: getattr(values[name], values[name].WhichOneof("value") or "", None) for name in list(values)}
    for name, value in given.items():
        part = f"{PART}, loss_fn_config, {name[:_TEXT_CHARACTERS]}"
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise ProtocolError(f"its value is {value}.", part=part, hint="Send a finite number or a text.")
        if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
            raise ProtocolError(f"its text has {len(value)} characters.", part=part)
    if len(given) > _CONFIG_KEYS:
        raise ProtocolError(f"it has {len(given)} settings.", part=f"{PART}, loss_fn_config")
    return {name: value for name, value in given.items() if value is not None}


def _batch(datums: Sequence[_Datum]) -> TokenBatch:
    """The batch of all datums, with the same inputs and as many labels each."""
    names = sorted({name for datum in datums for name in datum.values})
    for index, datum in enumerate(datums):
        lacking = [name for name in names if name != WEIGHTS and name not in datum.values]
        if lacking:
            raise ProtocolError(
                f"it has no {', '.join(lacking)}, which other datums have.",
                part=f"{PART}, datum {index}",
                hint="All datums of a request have the same loss_fn_inputs.",
            )
    several = any(datum.targets.ndim > 1 for datum in datums)
    labels = max(datum.targets.shape[1] if datum.targets.ndim > 1 else 1 for datum in datums)
    _check_cells(sum(len(datum.tokens) for datum in datums) * labels * (1 + len(names)))
    columns = labels if several else None

    def packed(arrays: Sequence[Array], fill: int = 0) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([_padded(each, columns, fill) for each in arrays]))

    def values(name: str) -> list[Array]:
        ones = partial(np.ones, dtype=np.float32)
        return [each.values[name] if name in each.values else ones(each.targets.shape) for each in datums]

    # Tensors of all sequences, of which each has views: to make them one by one would take much longer.
    return unpacked_batch(
        MicroBatch(
            torch.from_numpy(np.concatenate([datum.tokens for datum in datums])),
            packed([datum.targets for datum in datums], IGNORED),
            torch.tensor([0, *(len(datum.tokens) for datum in datums)]).cumsum(0),
            {name: packed(values(name)) for name in names},
            {},
        )
    )


def _padded(found: Array, labels: int | None, fill: int) -> Array:
    """Pad `found`, [N] or [N, K], to [N, labels]; unchanged if `labels` is None."""
    if labels is None or found.shape[1:] == (labels,):
        return found
    found = found.reshape(len(found), -1)
    return np.pad(found, ((0, 0), (0, labels - found.shape[1])), constant_values=fill)
