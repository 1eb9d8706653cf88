"""Kills the servers that verifiers has started for a run, once the run is gone, even if it was killed.

verifiers ends them when the run ends, and starts each in a session of its own, which nothing else would end. They are known by an
environment variable. This file is a program that imports nothing of verifiers, so that it costs little: its argument is the value
of that variable, and its standard input ends with the run.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

MARK = "WEIGHTLANE_VERIFIERS_RUN"
"""Environment variable that the children of the run have from now on, and their children."""


@cache
def start_reaper() -> subprocess.Popen[bytes]:
    """Start the program for this process, once, and mark the children that it starts from now on."""
    value = secrets.token_hex(8)
    command = [sys.executable, "-I", __file__, value]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - this file
    os.environ[MARK] = value
    return reaper


def main() -> None:
    """Wait for the end of standard input, then kill."""
    mark = f"{MARK}={sys.argv[1]}".encode()
    sys.stdin.buffer.read()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
