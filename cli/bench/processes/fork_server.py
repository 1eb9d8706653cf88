"""A process that has torch loaded and forks the benchmark's sender and receivers, and ends them with itself.

Run as ``python -m weightlane.cli.bench.processes.fork_server DIRECTORY CONTROL BYTES FD...``: one end of a Unix socket pair per
worker, the first one the sender's, and BYTES of memory that all of them share. The process ids are told over CONTROL, one JSON
line. When its other end closes, because whoever started the benchmark is done or was killed outright, every worker is killed,
and DIRECTORY, if any is named, removed with all that they wrote there. When this process is killed, the kernel kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import socket
import sys
from typing import NoReturn

from weightlane.ckpt_engines.conformance.processes.json_line import Line

from .worker import serve

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork the workers, and wait for the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; whoever started us decides
    directory = sys.argv[1]
    control, nbytes, *descriptors = map(int, sys.argv[2:])
    shared = mmap.mmap(-1, max(1, nbytes))
    line = Line(socket.socket(fileno=control))
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    nursery = os.getpid()
    forked: list[int] = []
    for index, mine in enumerate(sockets):
        pid = os.fork()
        if pid == 0:
            _be_worker(nursery, index, mine, [*(other for other in sockets if other is not mine)], line, shared)
        forked.append(pid)
    for sock in sockets:
        sock.close()
    line.send({"pids": forked})
    line.receive()
    for pid in forked:  # dead ones are not waited for before, so that no id can be somebody else's by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in forked:
        os.waitpid(pid, 0)
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _be_worker(
    nursery: int, index: int, mine: socket.socket, others: list[socket.socket], control: Line, shared: mmap.mmap
) -> NoReturn:
    status = 1
    try:
        with contextlib.suppress(AttributeError):  # no prctl: the worker's socket tells it too, between two calls
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            for other in others:  # or the death of its owner would not be an end of file
                other.close()
            control.close()
            serve(Line(mine), index, shared)
            status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
