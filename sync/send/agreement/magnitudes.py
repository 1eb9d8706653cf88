"""How trainer ranks agree on the scale of a block that a cut between them divides: each says how large its part is.

The elements of such blocks wait in the ranks' `Leftovers.cuts`. What is said of a version is one number for each of them.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError

from ...version.box import Box
from ..publication import Publication
from ..snapshot.quantised_blocks import Magnitudes
from ..snapshot.snapshot import Snapshot
from .rank_agreement import AgreementMailbox, RankAgreement

_PART = "block magnitudes"
_Shapes = Mapping[str, tuple[int, ...]]
"""Of the scales of matrices."""


class MagnitudeAgreement:
    """Of one session.

    Args:
        board: Private to the session.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, board: AgreementMailbox, names: Sequence[str], rank: int) -> None:
        self._talk = RankAgreement(board, names, rank, _PART)

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._talk.close()

    def look_again(self) -> None:
        """As `RankAgreement.look_again`."""
        self._talk.look_again()

    def say(self, version: int, mine: Iterable[Magnitudes]) -> None:
        """How large this rank's parts are."""
        self._talk.say(version, [_to_plain(each) for each in mine])

    def hear(
        self, version: int, shapes: _Shapes, deadline: Deadline, wanted: Callable[[], bool]
    ) -> dict[str, torch.Tensor]:
        """As `largest`, of what all ranks say. Raises as `RankAgreement.hear`, and `ProtocolError`."""
        said = (_from_plain(plain) for mine in self._talk.hear(version, deadline, wanted) for plain in _listed(mine))
        return largest(said, shapes)


def largest(parts: Iterable[Magnitudes], shapes: _Shapes) -> dict[str, torch.Tensor]:
    """The largest magnitude in each block of some matrices, float32 of their `shapes`; 0 where no part says anything.

    Raises `ProtocolError` for parts of blocks that a matrix does not have.
    """
    merged = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
    for part in parts:
        if (whole := merged.get(part.name)) is None:
            continue
        if not part.blocks.fits(tuple(whole.shape)) or part.values.shape != part.blocks.shape:
            raise ProtocolError(f"ranks disagree about the shape of {part.name}.", part=_PART)
        there = whole[part.blocks.index]
        torch.maximum(there, part.values.to(whole.device), out=there)
    return merged


def complete(
    held: Publication,
    snapshot: Snapshot,
    agreement: MagnitudeAgreement | None,
    deadline: Deadline,
    current: Callable[[], bool],
    writing: threading.Lock,
) -> None:
    """Quantise what is held of cut blocks into the snapshot of `held`, unless that was done. Waits for what other ranks say.

    Args:
        held: The publication.
        snapshot: How it is taken.
        agreement: With the other ranks, if there are any.
        deadline: For all of it.
        current: Whether `held` is still what is to be sent.
        writing: Held while the memory of a snapshot is written to.

    Raises:
        ClosedError: The publication was given up, or the session is over.
        DeadlineExceededError: A rank has said nothing.
    """
    if snapshot.is_cut:
        held.progress.wait_read(snapshot.read_end, deadline)
    remains = held.remains
    if agreement is not None:
        agreement.say(held.version, remains.magnitudes)  # in every session: others may have missed it in the one before
    if held.is_complete or not snapshot.is_cut:
        return
    shapes = {cut.pair.weight.name: cut.pair.scales.shape for cut in remains.cuts}
    if agreement is not None:
        merged = agreement.hear(held.version, shapes, deadline, current)
    else:
        merged = largest(remains.magnitudes, shapes)
    with writing:
        if not current() or held.slot is None:
            raise ClosedError(f"version {held.version} was given up.", part=_PART)
        for cut in remains.cuts:
            remains.error += cut.quantise(merged[cut.pair.weight.name], held.slot.memory.data)
        held.is_complete = True
        remains.cuts.clear()  # where rows are divided that is as much as the shards themselves


def _to_plain(magnitudes: Magnitudes) -> list[Any]:
    values = base64.b64encode(magnitudes.values.cpu().contiguous().numpy().tobytes()).decode()
    return [magnitudes.name, *magnitudes.blocks.to_plain(), values]


def _listed(said: Any) -> list[Any]:
    if not isinstance(said, list):
        raise ProtocolError("not a list of magnitudes.", part=_PART)
    return said


def _from_plain(plain: Any) -> Magnitudes:
    try:
        name, starts, shape, values = plain
        blocks = Box.from_plain([starts, shape])
        numbers = torch.frombuffer(bytearray(base64.b64decode(values, validate=True)), dtype=torch.float32)
        return Magnitudes(str(name), blocks, numbers.view(blocks.shape))
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ProtocolError(f"not magnitudes: {cause}.", part=_PART) from None
