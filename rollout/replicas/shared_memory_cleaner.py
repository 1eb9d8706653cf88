"""`SharedMemoryCleaner`: a process that outlives a replica for a moment and removes the replica's shared memory.

Ray kills a dead actor's whole process group at once, so that none of the replica's own processes can clean up. The cleaner
``python -m weightlane.rollout.replicas.shared_memory_cleaner`` runs in a separate session, with the segments' names as arguments.
It waits for the end of its standard input, which closes with the replica, even if the replica is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..vllm.shared_memory import unlink

_WAIT_S = 5.0
"""Most seconds that `close` waits for the cleaner, which needs a few milliseconds."""


class SharedMemoryCleaner:
    """The cleaner of one replica. Closing it, or the death of this process, starts the removal.

    Args:
        segments: Paths of the segments.
    """

    def __init__(self, segments: Iterable[Path]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module, names from /proc
            [sys.executable, "-m", __name__, *map(str, segments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let the cleaner remove the segments now. Idempotent, never raises, ends within seconds."""
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
