"""A process that has torch loaded and forks: a fresh half costs milliseconds instead of the seconds of ``import torch``.

Run as ``python -m weightlane.ckpt_engines.conformance.processes.fork_server FD``, with one end of a Unix socket pair as file
descriptor FD. Each message on it is either `FORK` with a file descriptor attached, the new process's own line, and answered
with its process id; or the name of a module to import for all processes to come, answered with 0. The nursery never starts a
thread nor loads an engine by itself. When the other end closes, it kills everything it forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import struct
import sys

from . import half_process

PID = struct.Struct("<i")
FORK = b"!"
_MAX_MESSAGE_BYTES = 4096
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Fork on request until the other end closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; whoever started us decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    forked: list[int] = []
    libc = ctypes.CDLL(None)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
        if not message:
            break
        if message != FORK:
            with contextlib.suppress(ImportError):  # whoever needs it will say so
                importlib.import_module(message.decode())
            control.sendall(PID.pack(0))
            continue
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != nursery:
                os._exit(1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            half_process.serve(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        forked.append(pid)
        control.sendall(PID.pack(pid))
    for pid in forked:
        try:
            # Process ids come round again: only what is still our child may be killed.
            if _parent(pid) == os.getpid():
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        return int(file.read().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main()
