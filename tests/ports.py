"""TCP ports for programs that cannot choose one themselves."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Linux gives outgoing connections ports from 32,768 on: one of those may be in use by the time a slow program listens."""


def free_port() -> int:
    """One on loopback that was free a moment ago, and that no outgoing connection takes meanwhile."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.choice(_BELOW_EPHEMERAL)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
