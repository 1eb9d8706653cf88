"""Outlives a replica by a moment and removes the shared memory it left behind.

Ray ends a dead actor's whole process group at once, so none of the replica's own processes gets to clean up. The janitor is in
a session of its own: ``python -m weightlane.rollout.replicas.shared_memory_cleaner``, started with the segments' names as
arguments, waits for the end of its standard input, which comes when the replica closes it or dies, however it dies.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..vllm.shared_memory import unlink

_WAIT_S = 5.0


class SharedMemoryCleaner:
    """The replica's end: holds the pipe whose closing starts the work."""

    def __init__(self, segments: Iterable[Path]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module, names from /proc
            [sys.executable, "-m", __name__, *map(str, segments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Have the segments removed now. Idempotent, never raises; ends within seconds."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_S)


def main() -> None:
    """Wait for the end of standard input, then remove the segments named as arguments."""
    sys.stdin.read()
    unlink(Path(name) for name in sys.argv[1:])


if __name__ == "__main__":
    main()
