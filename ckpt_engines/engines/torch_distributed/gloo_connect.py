"""Connecting the members of a gloo group within a deadline. If any two members did not connect, all try again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ...errors import PeerLostError
from ...waits import Deadline

_T = TypeVar("_T")

_PART = "process group"
_TIMEOUT_FACTOR = 5
"""gloo waits for a connection for this multiple of its timeout (gloo/transport/tcp/pair.h)."""
_TRIES = 3
"""One try may use this fraction of the seconds left, so that at least two more fit in."""
_SHORTEST_TRY_S, _LONGEST_TRY_S = 1.0, 60.0
_GRACE_S = 5.0
"""How long a member on a busy machine may need to report a try's outcome after the try has ended."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""First and longest pause between two queries of the store; each pause is twice the one before."""


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
    """Connect all members of a gloo group, and try again when any of them could not.

    gloo connects every pair of members. Where one side of a pair does not call, because it has given up or believes that it did,
    the other waits for five times its timeout. So all members meet in the store first, a try gets a part of the time, and every
    member learns the outcome of all others before the group is used.

    `connect` makes the group, given a store of its own for this try and the timeout for gloo. `undo` undoes a `connect` that
    failed, or that succeeded while another member's failed. `store` belongs to this group alone, and `deadline` bounds all tries
    together. `names` are those of the members for errors, by rank; without, "rank 1".

    Raises:
        DeadlineExceededError: A member did not join, or no try succeeded.
        PeerLostError: A member joined and then fell silent.
    """
    attempt = 0
    while True:
        meeting = dist.PrefixStore(f"try{attempt}", store)
        if missing := member_names(_await_all(meeting, "here", rank, world, deadline), names):
            raise deadline.error(f"{missing} of a group of {world}", part=_PART, peer=missing, hint=hint)
        end = deadline.within(min(_LONGEST_TRY_S, max(_SHORTEST_TRY_S, deadline.remaining_s / _TRIES)))
        groups: list[_T] = []
        failure: RuntimeError | None = None
        try:
            groups.append(connect(dist.PrefixStore("group", meeting), end.timedelta() / _TIMEOUT_FACTOR))
        except RuntimeError as error:
            failure = error
            meeting.add("failed", 1)
        reported = deadline.within(end.remaining_s + _GRACE_S)
        missing = member_names(_await_all(meeting, "tried", rank, world, reported), names)
        if not missing and meeting.add("failed", 0) == 0:
            return groups[0]
        groups.clear()
        undo()
        deadline.check(f"a group of {world} to connect to each other", part=_PART, peer=missing, hint=hint)
        if missing:
            raise PeerLostError(
                f"{missing} joined the group and then fell silent.",
                part=_PART,
                peer=missing,
                hint="Look at its own log for the reason.",
            ) from failure
        attempt += 1


def member_names(ranks: Sequence[int], names: Sequence[str]) -> str:
    """Return the names of these ranks for an error message; "rank 1" where the group has no `names`."""
    if not names and ranks:
        return f"rank {', '.join(map(str, ranks))}"
    return ", ".join(names[rank] for rank in ranks)


def _await_all(meeting: dist.Store, step: str, rank: int, world: int, deadline: Deadline) -> list[int]:
    """Tell all members that this one has reached `step`, and wait for them; returns the ranks missing at the deadline.

    This polls, because torch logs warnings when a wait of the store fails.
    """
    meeting.set(f"{step}/{rank}", "")
    meeting.add(step, 1)
    pause_s = _SHORTEST_PAUSE_S
    while meeting.add(step, 0) < world:
        if deadline.expired:
            return [member for member in range(world) if not meeting.check([f"{step}/{member}"])]
        time.sleep(min(pause_s, deadline.remaining_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return []
