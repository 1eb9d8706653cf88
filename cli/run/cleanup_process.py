"""Outlives a run that ends without a word, says so, and clears up behind it.

Ray ends the process of a run whose raylet is gone at once: no handler and no clean-up of it runs. Nor does any when the process
is killed. The undertaker is in a session of its own: ``python -m weightlane.cli.run.cleanup_process``, with the directory of
the run's Ray and that for its logs as arguments, waits for the end of its standard input. Unless it is dismissed before, it
speaks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_DISMISSED = b"all is done\n"
_WAIT_S = 5.0
_RAY_ENDS_S = 15.0
"""How long Ray's own processes may go on writing when the run's has gone."""


class CleanupProcess:
    """The run's end: holds the pipe whose closing starts the work."""

    def __init__(self, files: Path, logs: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module, paths of the run
            [sys.executable, "-m", __name__, str(files), str(logs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The run has cleared up itself. Idempotent, never raises; ends within seconds."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # closed before
            self._process.stdin.write(_DISMISSED)
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_S)


def keep_logs(files: Path, logs: Path, *names: str) -> None:
    """Copy what the cluster in `files` has logged under `names`, patterns, to `logs`, but for what is empty. Never raises."""
    with suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        for name in names:
            for log in files.glob(f"session_*/logs/{name}"):
                if not log.is_symlink() and log.stat().st_size:
                    shutil.copy(log, logs)


def main() -> None:
    """Wait for the end of standard input; then, unless dismissed, say that the run has ended and remove what it left."""
    if sys.stdin.buffer.read() == _DISMISSED:
        return
    files, logs = map(Path, sys.argv[1:])
    keep_logs(files, logs, "worker-*", "raylet.*", "python-core-driver-*")
    print(  # noqa: T201 - on the terminal of the run
        "error: ray: the run's process has ended without a word: it was killed, or ended by Ray, which ends it when its raylet"
        f" on this machine is gone. Logs of the run's processes: {logs}. A run that has saved a state goes on with --resume.",
        file=sys.stderr,
        flush=True,
    )
    end = time.monotonic() + _RAY_ENDS_S
    while files.exists() and time.monotonic() < end:
        shutil.rmtree(files, ignore_errors=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
