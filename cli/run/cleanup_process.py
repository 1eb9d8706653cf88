"""A process that reports a killed run and removes the files of its Ray.

Ray kills the process of a run whose raylet is gone, so that no handler or clean-up of the run itself can do this. The cleanup
process is in a session of its own: ``python -m weightlane.cli.run.cleanup_process``, with the directory of the run's Ray, the
directory for its logs, and a hint how to continue as arguments, waits for the end of its standard input. It acts unless the run
dismissed it before.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_DISMISSED = b"dismissed\n"
_END_S = 5.0
"""Seconds that the dismissed process may take to end."""
_RAY_ENDS_S = 15.0
"""Seconds for which Ray's own processes may keep writing after the run has ended."""


class CleanupProcess:
    """Starts the cleanup process, and holds the pipe whose end makes it act.

    `files` is the directory of the run's Ray, which is removed, and `logs` the one to which Ray's logs are copied. `hint` says
    how to continue after the run was killed.
    """

    def __init__(self, files: Path, logs: Path, hint: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module, paths of the run
            [sys.executable, "-m", __name__, str(files), str(logs), hint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the process within seconds, because the run has cleaned up itself. Idempotent, never raises."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it was dismissed before
            self._process.stdin.write(_DISMISSED)
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def keep_logs(files: Path, logs: Path, *names: str) -> None:
    """Copy the non-empty logs of the cluster in `files` that match the patterns `names` to `logs`. Never raises."""
    with suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        for name in names:
            for log in files.glob(f"session_*/logs/{name}"):
                if not log.is_symlink() and log.stat().st_size:
                    shutil.copy(log, logs)


def main() -> None:
    """Wait for the end of standard input. Then, unless dismissed, report the end of the run and remove its files."""
    if sys.stdin.buffer.read() == _DISMISSED:
        return
    files, logs, hint = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    keep_logs(files, logs, "worker-*", "raylet.*", "python-core-driver-*")
    print(  # noqa: T201 - on the terminal of the run
        "error: ray: the process of the run was killed, perhaps by Ray itself, which does so when its raylet on this machine"
        f" has died. Logs of the run's processes: {logs}. {hint}",
        file=sys.stderr,
        flush=True,
    )
    end = time.monotonic() + _RAY_ENDS_S
    while files.exists() and time.monotonic() < end:
        shutil.rmtree(files, ignore_errors=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
