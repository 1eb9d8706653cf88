"""Faults between the members of a gloo group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

_LOOPBACK = b"\x7f\x00\x00\x01"
_HIGHEST_PORT = b"\xff\xff"
"""Port to publish so that the other member waits: of two members, the one with the lower port waits to be called."""


def publish_and_never_call(place: dist.Store, rank: int, timeout: timedelta) -> None:
    """Be a member of a group of two that the other one waits for: gloo tells of this member, and it never calls.

    Raises torch's RuntimeError when the other one does not tell of itself in time.
    """
    other = f"0/{1 - rank}"
    place.wait([other], timeout)
    said = place.get(other)  # the name of its host, its address and more
    port = said.index(_LOOPBACK) - 2  # of a sockaddr_in: the port comes before the address
    place.set(f"0/{rank}", said[:port] + _HIGHEST_PORT + said[port + 2 :])
