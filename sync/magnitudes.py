"""How trainer ranks agree on the scale of a block that a cut between them divides: each says how large its part is.

The rows of such blocks wait in the ranks' `Remains.cuts`. What is said of a version is a few numbers for each column of blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError

from .publication import Publication
from .quantised_snapshot import CutRows
from .rank_talk import Board, RankTalk
from .snapshot import Snapshot

_PART = "block magnitudes"
_Key = tuple[str, int]


class MagnitudeAgreement:
    """Of one session.

    Args:
        board: Private to the session.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, board: Board, names: Sequence[str], rank: int) -> None:
        self._talk = RankTalk(board, names, rank, _PART)

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._talk.close()

    def say(self, version: int, cuts: Iterable[CutRows]) -> None:
        """How large this rank's parts are."""
        self._talk.say(version, [[*cut.key, *cut.amax.flatten().tolist()] for cut in cuts])

    def hear(self, version: int, deadline: Deadline, wanted: Callable[[], bool]) -> dict[_Key, torch.Tensor]:
        """The magnitudes of whole blocks, float32 [1, blocks], by matrix and row of blocks. Raises as `RankTalk.hear`."""
        merged: dict[_Key, torch.Tensor] = {}
        for said in self._talk.hear(version, deadline, wanted):
            for key, amax in _parsed(said):
                merge(merged, key, amax)
        return merged


def merge(merged: dict[_Key, torch.Tensor], key: _Key, amax: torch.Tensor) -> None:
    """Take note of what one part of a block is."""
    other = merged.get(key)
    if other is not None and other.shape != amax.shape:
        raise ProtocolError(f"ranks disagree about the shape of {key[0]}.", part=_PART)
    merged[key] = amax if other is None else torch.maximum(other, amax)


def complete(
    held: Publication,
    snapshot: Snapshot,
    agreement: MagnitudeAgreement | None,
    deadline: Deadline,
    current: Callable[[], bool],
    writing: threading.Lock,
) -> None:
    """Quantise the rows of cut blocks into the snapshot of `held`, unless that was done. Waits for what other ranks say.

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
    cuts = held.remains.cuts
    if agreement is not None:
        agreement.say(held.version, cuts)  # in every session: others may have missed it in the one before
    if held.is_complete or not snapshot.is_cut:
        return
    if agreement is not None:
        merged = agreement.hear(held.version, deadline, current)
    else:
        merged = {}
        for cut in cuts:
            merge(merged, cut.key, cut.amax.cpu())
    with writing:
        if not current() or held.slot is None:
            raise ClosedError(f"version {held.version} was given up.", part=_PART)
        for cut in cuts:
            held.remains.error += cut.quantise(merged[cut.key].to(cut.amax.device), held.slot.memory.data)
        held.is_complete = True


def _parsed(said: Any) -> list[tuple[_Key, torch.Tensor]]:
    try:
        return [
            ((str(name), int(row)), torch.tensor([list(map(float, amax))], dtype=torch.float32))
            for name, row, *amax in said
        ]
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"not a list of magnitudes: {cause}.", part=_PART) from None
