"""Supervises one agent program: a process, forked from a warm one, that starts the program and ends all that it has started."""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from weightlane.ckpt_engines.runtime.json_socket import JsonSocket

_TAIL_BYTES = 16384
"""Most bytes of output that are kept, the last ones: they fit in a socket's buffer."""
_READ_BYTES = 65536
_PR_SET_PDEATHSIG = 1


def supervise(asker: JsonSocket) -> None:
    """Run the program that `asker` sends, and tell it how the program ended. Then, or when `asker` closes, end the group.

    The program, and what it starts without leaving its process group, end with the run, and with the fork server: this process
    ends the group when `asker` has closed, or the server has died.
    """
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    order = asker.receive()
    if order is None:
        return
    with tempfile.TemporaryFile() as given:
        given.write(order["stdin"].encode())
        given.seek(0)
        outputs = [os.pipe(), os.pipe()]
        supervisor = os.getpid()
        program = os.fork()
        if not program:
            asker.close()
            _become(order, supervisor, [given.fileno(), outputs[0][1], outputs[1][1]])
    for _, written in outputs:
        os.close(written)
    out, err = _output(program, [read for read, _ in outputs], asker)
    _, status = os.waitpid(program, 0)
    asker.send({"status": os.waitstatus_to_exitcode(status), "out": out, "err": err})
    asker.receive()  # until it has been read
    os.killpg(0, signal.SIGKILL)


def _output(program: int, pipes: Sequence[int], asker: JsonSocket) -> list[str]:
    """Read the program's outputs until it ends. Ends the group if the asker has gone."""
    tails = {pipe: bytearray() for pipe in pipes}
    ended = os.pidfd_open(program)
    poll = select.poll()
    for descriptor in (*pipes, ended, asker.fileno()):
        poll.register(descriptor, select.POLLIN)
    for pipe in pipes:
        os.set_blocking(pipe, False)
    running = True
    while running:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if asker.fileno() in ready:  # it sends nothing more
            os.killpg(0, signal.SIGKILL)
        running = ended not in ready
        for pipe in pipes:
            more = b""
            with suppress(BlockingIOError):
                while more := os.read(pipe, _READ_BYTES):
                    tails[pipe] = (tails[pipe] + more)[-_TAIL_BYTES:]
                    if running:
                        break
                if not more and running and pipe in ready:
                    poll.unregister(pipe)
    return [bytes(tail).decode(errors="replace") for tail in tails.values()]


def _become(order: Mapping[str, Any], supervisor: int, descriptors: Sequence[int]) -> NoReturn:
    """Turn this forked process into the program."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:  # otherwise it died before the line above
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.chdir(order["folder"])
            if order["forked"]:
                status = _run_python(order["command"], order["environment"])
            else:
                for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and no other program expects it
                    signal.signal(ignored, signal.SIG_DFL)
                os.execvpe(order["command"][0], order["command"], order["environment"])  # noqa: S606 - the user's program
    except BaseException:  # noqa: BLE001 - it must never return into the supervisor
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _run_python(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``python SCRIPT ARGUMENTS`` in this process, and end as Python does. Returns its exit status."""
    atexit._clear()  # what the fork server would do at its own end
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else every episode draws the same numbers; `random` does so by itself
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command[1:])
    script = Path(command[1]).resolve()  # processes that it spawns look for it elsewhere
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            sys.stderr.write(f"{left.code}\n")
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # which ends the threads of pools, too
        atexit._run_exitfuncs()
    return 0
