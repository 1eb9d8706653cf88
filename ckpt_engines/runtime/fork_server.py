"""A fork server: a process that has torch loaded and forks children in milliseconds. An ``import torch`` takes seconds.

`multiprocessing`'s own fork server would not do, for three reasons:

- A program has only one, with the environment and the preloaded modules of its first use. Children here need
  ``OMP_NUM_THREADS=1`` from the start, because a process with threads cannot be forked safely.
- Each of its children runs the main module of the program again, which may be pytest, or a script that loads vLLM.
- Its children, and their files, outlive a program that is killed.

The server takes JSON requests from a Unix socket. ``{"preload": module}`` imports a module for all later children.
``{"fork": "module:function", "arguments": [...]}``, with the child's own socket attached, forks a child that calls the function.
Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from ..errors import DeadlineExceededError, WorkerDiedError
from .json_socket import JsonSocket

_PART = "fork server"
_START_S = 120.0
"""Longest time in seconds for a request. The first one waits for ``import torch``, which is slow from a cold disk."""
_END_S = 10.0
"""Longest time in seconds that killed processes may take to end."""
_MAX_REQUEST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A child of a fork server, and this end of the socket on which it takes requests.

    Its standard output and standard error go to the file `log`; None if there is none.
    """

    def __init__(self, pid: int, socket: JsonSocket, log: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.socket = socket
        self._log = log
        self._pidfd = os.pidfd_open(pid)
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the process runs or is stopped."""
        return not self._closed and not select.select([self._pidfd], [], [], 0)[0]

    def send_signal(self, number: int) -> None:
        """Send a signal to the process. Raises `ProcessLookupError` when it has ended."""
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL, wait until the process has ended, and close its socket. Idempotent."""
        if self._closed:
            return
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        select.select([self._pidfd], [], [], _END_S)
        self._closed = True
        os.close(self._pidfd)
        self.socket.close()

    def output(self) -> str:
        """Return the text that this child, its siblings and the server wrote to standard output and standard error."""
        return _text(self._log) if self._log is not None else ""


class ForkServer:
    """Starts a fork server and requests children from it. They all end with this process, even if it is killed.

    The server imports the modules `preload`, which must not start threads, before it forks. `directory` is removed, with
    everything that children wrote there, after the last child has ended. `environment` are further variables, and `descriptors`
    are inherited by children under the same numbers.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._directory = directory
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_START_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(directory or ""), *preload],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno(), *descriptors],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",  # a process with threads cannot be forked safely
                    "OPENBLAS_NUM_THREADS": "1",
                    # Libraries check at import whether there is a GPU. If torch checked through CUDA, no child could use CUDA.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                    **(environment or {}),
                },
            )

    def preload(self, module: str) -> None:
        """Import `module` for all later children. A module that cannot be imported fails in the child that needs it."""
        self._ask({"preload": module})

    def fork(self, target: str, *arguments: Any) -> ForkedProcess:
        """Fork a child that calls a function, ``module:function``, with its `JsonSocket` and `arguments`, plain data.

        The child ends when the function returns. Raises `WorkerDiedError` when the server has ended, and `DeadlineExceededError`
        when it does not answer.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._ask({"fork": target, "arguments": arguments}, [theirs.fileno()])
            return ForkedProcess(pid, JsonSocket(ours), self._log)
        except BaseException:
            ours.close()
            raise

    def close(self) -> None:
        """End the server and every child, and remove the directory. Idempotent."""
        self._control.close()  # the server then kills its children
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills its children
            self._process.wait(_END_S)
        _remove(self._directory)  # the server has done so, unless it was killed
        self._log.close()

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(_MAX_REQUEST_BYTES)
        except TimeoutError:
            raise DeadlineExceededError(f"no process could be started within {_START_S:.0f} s.", part=_PART) from None
        except OSError:
            answer = b""
        if not answer:
            raise WorkerDiedError(f"no process can be started: {_text(self._log).strip()}", part=_PART)
        return int(json.loads(answer)["pid"])


def _text(log: IO[bytes]) -> str:
    with contextlib.suppress(ValueError, OSError):  # the file is closed
        return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
    return ""


def _remove(directory: Path | str | None) -> None:
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> NoReturn:
    """Serve requests until the other end of the control socket closes, then end every child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the program decides
    descriptor, directory, *modules = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    for module in modules:
        _import(module)
    children: set[int] = set()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 1)
        except ConnectionResetError:  # the program was killed before it read an answer
            break
        if not message:
            break
        request = json.loads(message)
        pid = 0
        if "preload" in request:
            _import(request["preload"])
        else:
            with socket.socket(fileno=descriptors[0]) as child_socket:
                pid = _fork(control, child_socket, request)
            children.add(pid)
            # Ended children stay zombies until here, so that no other process can get their ids.
            children = {child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0}
        with contextlib.suppress(OSError):  # the program has ended meanwhile
            control.sendall(json.dumps({"pid": pid}).encode())
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # if it leads a group, what it has started ends, too
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    _remove(directory)
    _end(0)  # the program waits, and taking torch down would need a second


def _import(module: str) -> None:
    with contextlib.suppress(ImportError):  # the child that needs it will raise
        importlib.import_module(module)


def _fork(control: socket.socket, child_socket: socket.socket, request: Mapping[str, Any]) -> int:
    server = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        gc.freeze()  # a collection would copy, page by page, everything that the server has imported
        if os.getppid() == server:  # otherwise the server died before the line above
            control.close()
            module, _, function = request["fork"].partition(":")
            getattr(importlib.import_module(module), function)(JsonSocket(child_socket), *request["arguments"])
            status = 0
    except BaseException:  # noqa: BLE001 - the child must never return into the server's loop
        traceback.print_exc()
    finally:
        _end(status)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
