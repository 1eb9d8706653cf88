"""Runs a server as a child in a session of its own, and ends all of it when the process that wanted it is gone.

    python -m weightlane.rollout.engines.sglang.supervisor OWNER_PID COMMAND...

SGLang's processes outlive a killed owner: no signal reaches them. This process watches the owner's id, because the owner may
have forked children that hold the other end of any pipe. SGLang also leaves shared memory behind however it ends, so that this
process removes what it has seen the server's processes map.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ...contract.named_segments import segments_of_trees, unlink

_POLL_S = 0.5
"""Seconds between two looks at the owner's id: the memory of a killed replica is soon needed by the next one."""
_LOOK_S = 5.0
"""Seconds between two looks at what the server's processes have mapped."""
_GRACE_S = 5.0
"""Seconds in which a server may end by itself."""


def main(owner: int, command: list[str]) -> int:
    """Run `command` until it ends, SIGTERM arrives, or this process is no longer a child of `owner`; return its exit code."""
    stopping = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - the replica's own
    segments: set[Path] = set()
    next_look = 0.0
    while server.poll() is None and not stopping and os.getppid() == owner:
        if time.monotonic() >= next_look:
            segments |= segments_of_trees([server.pid])
            next_look = time.monotonic() + _LOOK_S
        with suppress(subprocess.TimeoutExpired):
            server.wait(_POLL_S)
    segments |= segments_of_trees([server.pid])
    for number, limit_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(limit_s)
    unlink(segments)
    return server.returncode


if __name__ == "__main__":
    ended = main(int(sys.argv[1]), sys.argv[2:])
    if ended < 0:  # by a signal, which the owner is to see
        with suppress(OSError):
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    sys.exit(ended)
