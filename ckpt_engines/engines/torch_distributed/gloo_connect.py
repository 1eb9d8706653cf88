"""Connecting the members of a gloo group within a deadline, and again where two of them did not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ...deadline import Deadline
from ...errors import PeerLostError

_T = TypeVar("_T")

_PART = "process group"
_PATIENCE = 5
"""gloo waits for a connection for so many times the timeout it is given (gloo/transport/tcp/pair.h)."""
_SHARE = 3
"""A try may use one in so many of the seconds left."""
_SHORTEST_TRY_S, _LONGEST_TRY_S = 1.0, 60.0
_GRACE_S = 5.0
"""What a member may need beyond a try's end to say how it went, on a busy machine."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def connect_gloo(
    store: dist.Store,
    rank: int,
    world: int,
    deadline: Deadline,
    connect: Callable[[dist.Store, timedelta], _T],
    *,
    undo: Callable[[], None] = lambda: None,
    names: Sequence[str] = (),
    hint: str = "",
) -> _T:
    """Have all members of a gloo group connect, and try again when any of them could not.

    gloo connects every pair of members, and where one side of a pair does not call, because it has given up or believes that
    it did, the other waits for five times as long as it was told to. So all members meet in the store first, a try gets a
    part of the time, and everybody learns of everybody's outcome before the group is used.

    Args:
        store: A store of its own for this group.
        rank: This process's rank, from 0.
        world: Number of members.
        deadline: Bounds all of it.
        connect: Makes the group, given a store of its own for this try and the timeout for gloo.
        undo: Takes back a `connect` that failed, or that succeeded while another member's failed.
        names: What errors call the members, by rank; without, "rank 1".
        hint: For the error when the deadline passes.

    Raises:
        DeadlineExceededError: Somebody did not come, or no try succeeded.
        PeerLostError: Somebody came and was not heard of again.
    """
    attempt = 0
    while True:
        place = dist.PrefixStore(f"try{attempt}", store)
        if missing := called(_await_all(place, "here", rank, world, deadline), names):
            raise deadline.error(f"{missing} of a group of {world}", part=_PART, peer=missing, hint=hint)
        end = deadline.within(min(_LONGEST_TRY_S, max(_SHORTEST_TRY_S, deadline.remaining_s / _SHARE)))
        groups: list[_T] = []
        failure: RuntimeError | None = None
        try:
            groups.append(connect(dist.PrefixStore("group", place), end.timedelta() / _PATIENCE))
        except RuntimeError as error:
            failure = error
            place.add("failed", 1)
        patience = deadline.within(end.remaining_s + _GRACE_S)
        missing = called(_await_all(place, "tried", rank, world, patience), names)
        if not missing and place.add("failed", 0) == 0:
            return groups[0]
        groups.clear()
        undo()
        deadline.check(f"a group of {world} to connect to each other", part=_PART, peer=missing, hint=hint)
        if missing:
            raise PeerLostError(
                f"{missing} came to the group and was not heard of again.",
                part=_PART,
                peer=missing,
                hint="Look at its own log for the reason.",
            ) from failure
        attempt += 1


def called(ranks: Sequence[int], names: Sequence[str]) -> str:
    """What errors call the members of a group with these ranks."""
    if not names and ranks:
        return f"rank {', '.join(map(str, ranks))}"
    return ", ".join(names[rank] for rank in ranks)


def _await_all(place: dist.Store, what: str, rank: int, world: int, deadline: Deadline) -> list[int]:
    """Tell everybody that this member has come so far, and wait for the others; returns the ranks missing at the deadline.

    Asks again and again: a wait of the store's that ends without success makes torch write warnings.
    """
    place.set(f"{what}/{rank}", "")
    place.add(what, 1)
    pause_s = _SHORTEST_PAUSE_S
    while place.add(what, 0) < world:
        if deadline.expired:
            return [member for member in range(world) if not place.check([f"{what}/{member}"])]
        time.sleep(min(pause_s, deadline.remaining_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return []
