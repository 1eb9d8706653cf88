"""Ends and removes what an engine's processes leave behind when the replica is killed: a server, and shared memory.

vLLM unlinks its segments at shutdown, and Python's resource tracker unlinks the segments that it knows. A killed process does not
unlink the buffers between tensor-parallel ranks, a tracker that is killed with its parent (Ray ends whole trees) unlinks nothing,
and SGLang leaves segments behind however it ends. No signal reaches the processes of an SGLang server whose owner is killed.

Ray kills a dead actor's whole process group at once, and an actor whose raylet has died first kills its child processes, so that
none of the replica's own processes can clean up. A cleaner therefore runs in a separate session, as nobody's child:
``python -m weightlane.rollout.contract.cleaner OWNER_PID``. It reads lines of JSON, which say what is to be ended and removed,
until the replica's process says so or ends. It watches that process itself, too: a program may have forked children, which hold
the other end of any pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .named_segments import segments_of_trees, unlink

_WAIT_S = 10.0
"""Most seconds that `close` waits for the cleaner, which needs a few milliseconds, or as long as a server takes to end."""
_POLL_S = 0.5
"""Seconds between two looks at what a replica that starts has mapped."""
_SERVER_POLL_S = 5.0
"""Seconds between two looks at what a server has mapped, as long as it runs."""
_GRACE_S = 5.0
"""Seconds in which a server may end by itself."""


class Cleaner:
    """The cleaner of one replica, which outlives it for a moment. Closing it, or the death of this process, starts the removal.

    Until `settle`, it looks for itself what a watched process and its descendants map: vLLM makes segments long before it has
    started.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # nothing is written: the end of it is the end of the cleaner
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_S)  # it has forked the cleaner

    def watch(self, server: int = 0) -> None:
        """Watch a `server`, which leads a process group that is to be ended; or this process, of which nothing is ended."""
        before = () if server else segments_of_trees([os.getpid()])  # of other engines in this process
        self._send({"watched": server or os.getpid(), "group": server, "before": sorted(map(str, before))})

    def settle(self, segments: Iterable[Path]) -> None:
        """Say which segments are the replica's: these and no other ones are removed."""
        self._send({"segments": sorted(map(str, segments))})

    def begin(self) -> None:
        """Let the cleaner end and remove everything, without waiting for it."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._send({"end": True})  # a forked child may hold the pipe open
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Wait until the cleaner has ended and removed everything. Idempotent, never raises, ends within seconds."""
        self.begin()
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            select.select([self._process.stdout], [], [], _WAIT_S)
            self._process.stdout.close()

    def _send(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # a cleaner that was killed costs names, not the replica
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def main(owner: int) -> None:
    """In a process of its own, find out what is to be removed until `owner` says so or ends, then remove it."""
    ends = [0]
    with suppress(OSError):  # a kernel or a container without them: the end of the pipe tells, too
        ends.append(os.pidfd_open(owner))
    if os.fork():
        os._exit(0)
    segments: set[str] = set()
    before: set[str] = set()
    watched, group, rest = 0, 0, b""
    ended = False
    while not ended:
        poll_s = (_SERVER_POLL_S if group else _POLL_S) if watched else None
        readable = select.select(ends, [], [], poll_s)[0]
        piece = os.read(0, 1 << 16) if 0 in readable else b""
        ended = bool(readable) and not piece
        if group and not _lives(group):
            watched = group = 0  # another process may get its id
        *lines, rest = (rest + piece).split(b"\n")
        messages = [json.loads(line) for line in lines]
        ended = ended or any("end" in message for message in messages)
        if watched and (ended or not piece):
            segments |= {str(each) for each in segments_of_trees([watched])} - before
        for message in messages:
            if "end" in message:
                break
            watched, group = message.get("watched", 0), message.get("group", 0)
            before, segments = set(message.get("before", ())), set(message.get("segments", ()))
    if group:
        _end(group)
    unlink(map(Path, segments))


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _end(group: int) -> None:
    """End all processes of a group, after a while by force."""
    end = time.monotonic() + _GRACE_S
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while _lives(group) and time.monotonic() < end:
            time.sleep(_POLL_S / 10)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
