"""Starts Python processes by forking one that has imported vLLM, torch and transformers: an import of vLLM takes 14 CPU seconds.

A process that is started here differs from one that is started by itself in nothing that weightlane or vLLM look at: it is a
child of the process that asked for it, has the environment, the working directory and the file descriptors that it was given,
and runs the same code as ``__main__``. It can be waited for, signalled and killed like any other child.

    install()  # from now on processes of ``multiprocessing``, vLLM's for example, are forked
    pid = fork_python(["program.py", "argument"], env, {0: 0, 1: pipe, 2: 2})

How: each process has a server of its own, a child that waits for requests and does nothing else. The server forks twice, and
the process in between ends at once, so that the kernel gives its child to the nearest subreaper, which the asking process is
meanwhile. A forked process has its server from birth, because later it would have threads, and those cannot be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from waiting import HANG_S

IMPORTS = (
    "weightlane.rollout.replicas.local_replica",
    "weightlane.rollout.vllm.transfer_engine",
    "weightlane.trainer.engines.fsdp2.engine",
    "weightlane.trainer.engines.megatron.engine",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2_moe", "qwen3", "qwen3_moe")),
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.qwen3",
    "vllm.entrypoints.openai.api_server",
)
"""Modules that the first server imports."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables that these imports read. Each forked process gets its own environment later."""
_PAUSE_S = 0.0005
"""Seconds between two looks of a rank for work: short beside a decode step, of a few milliseconds."""
_PR_SET_CHILD_SUBREAPER = 36
_MOST_DESCRIPTORS = 64
_STARTS_OF_MULTIPROCESSING = ("spawn_main(", "multiprocessing.forkserver import main")
"""In commands of processes that run code of ours: those of "spawn", and the server of "forkserver"."""


class _Server:
    """This process's end of the line to its server."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.line = line
        self.process = process
        atexit.register(self.end)

    def end(self) -> None:
        """Let it end. A server that this process started is waited for, so that its CPU time counts."""
        self.line.close()
        if self.process is not None:
            self.process.wait(HANG_S)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        _be_subreaper(True)
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self.line, [len(data).to_bytes(8, "big")], list(descriptors))
            self.line.sendall(data)
            answer = self.line.recv(8)
        finally:
            _be_subreaper(False)
        if not answer:
            raise RuntimeError("the fork server has ended; its last words are on standard error")
        return int.from_bytes(answer, "big")


_server: _Server | None = None
_lock = threading.Lock()
"""Several engines start at the same time, each in a thread: they share one server, and the process is a subreaper for all."""
_spawn = util.spawnv_passfds


def fork_python(
    arguments: Sequence[str],
    env: Mapping[str, str],
    descriptors: Mapping[int, int],
    *,
    cwd: str | None = None,
    new_session: bool = False,
) -> int:
    """Start ``python <arguments>``, a script, ``-m module`` or ``-c code``; returns its process id.

    Args:
        descriptors: Number of each file descriptor there, and here.
        cwd: Its working directory; None for this process's.
        new_session: Whether it leads a session, and so a process group, of its own.
    """
    global _server  # noqa: PLW0603 - a process has one
    request = {
        "arguments": list(arguments),
        "env": dict(env),
        "numbers": list(descriptors),
        "cwd": cwd or str(Path.cwd()),
        "new_session": new_session,
    }
    with _lock:
        if _server is None:
            _server = _first_server()
        return _server.fork(request, list(descriptors.values()))


class ForkedPopen(subprocess.Popen[str]):
    """A `subprocess.Popen` whose ``[sys.executable, *arguments]`` is forked.

    Overrides the one method in which CPython starts the program (the same in 3.11 to 3.14).
    """

    def _execute_child(  # type: ignore[override]
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, process_group: Any,
    ) -> None:  # fmt: skip
        wanted = {0: p2cread, 1: c2pwrite, 2: errwrite}
        descriptors = {number: number if given == -1 else given for number, given in wanted.items()}
        descriptors |= {number: number for number in pass_fds}
        self.pid = fork_python(args[1:], env, descriptors, cwd=cwd, new_session=start_new_session)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def install() -> None:
    """Let "spawn" and "forkserver" of ``multiprocessing`` fork in this process, and in all that are forked from it."""
    util.spawnv_passfds = _forked_instead  # type: ignore[assignment]


def end_server() -> None:
    """End this process's server, if it has one."""
    if _server is not None:
        _server.end()


def has_server() -> bool:
    """Whether this process has one: it was forked, or has forked others."""
    return _server is not None


def fork_workers() -> None:
    """Let pytest-xdist's workers be forked, so that each has a server from birth."""
    from execnet import gateway_io

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, args: Sequence[str], execmodel: Any) -> None:
            pipe = subprocess.PIPE
            self.popen = ForkedPopen(args, env=os.environ, stdin=pipe, stdout=pipe)
            gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = Forked


def _forked_instead(path: bytes, args: Sequence[str | bytes], passfds: Sequence[int]) -> int:
    words = [os.fsdecode(word) for word in args]
    if not any(start in word for word in words for start in _STARTS_OF_MULTIPROCESSING):
        return _spawn(path, args, passfds)  # multiprocessing's own helpers
    after = words[words.index("-c") :]
    return fork_python(after, os.environ, {number: number for number in sorted({0, 1, 2, *passfds})})


def _first_server() -> _Server:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    ours.settimeout(HANG_S)
    assert ours.recv(1) == b"r", "the fork server did not start; its last words are on standard error"
    ours.settimeout(None)
    return _Server(ours, process)


def _be_subreaper(yes: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(line: socket.socket) -> dict[str, Any] | None:
    """Obey requests; returns one in the process that is forked for it, and None when the asking process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    while (asked := _receive(line)) is not None:
        request, received = asked
        its_line, servers_line = socket.socketpair()
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(write, pid.to_bytes(8, "big"))
                os._exit(0)
            for number in (line.detach(), read, write):
                os.close(number)
            if request["new_session"]:
                os.setsid()  # before its server is there, so that what it forks is in its session, too
            if os.fork() == 0:  # the server of the process that is forked here
                for number in (its_line.detach(), *received):
                    os.close(number)
                return _serve(servers_line)
            servers_line.close()
            while os.getppid() == between:  # until the kernel has given this process to the one that asked
                time.sleep(0.001)
            _become(request, received, its_line)
            return request
        os.waitpid(between, 0)
        line.sendall(os.read(read, 8))
        for number in (read, write, its_line.detach(), servers_line.detach(), *received):
            os.close(number)
    return None


def _receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    head, received, *_ = socket.recv_fds(line, 8, _MOST_DESCRIPTORS)
    if not head:
        return None
    request: dict[str, Any] = json.loads(line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    return request, received


def _become(request: dict[str, Any], received: list[int], line: socket.socket) -> None:
    """Be, in this fresh process, what was asked for, with a server at the other end of `line`."""
    global _server  # noqa: PLW0603
    above = 1 + max(request["numbers"])  # out of the way of the numbers that are wanted
    _server = _Server(socket.socket(fileno=fcntl.fcntl(line, fcntl.F_DUPFD_CLOEXEC, above)))
    line.close()
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, above) for number in received]
    for number in received:
        os.close(number)
    for number, wanted in zip(moved, request["numbers"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # that of the environment, which Python looks for once
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in path if folder and folder not in sys.path]
    os.chdir(request["cwd"])
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def _run_to_its_end(arguments: list[str]) -> NoReturn:
    """Run a program and end as Python does, but for its last step: to take every module apart takes 0.7 CPU seconds here.

    A KeyboardInterrupt passes: Python has an end of its own for it.
    """
    code: Any = 0
    try:
        _run(arguments)
    except SystemExit as ended:
        code = ended.code
    except Exception:  # noqa: BLE001 - printed as Python does
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    os._exit((code or 0) & 0xFF)


def _run(arguments: list[str]) -> None:
    """Run a program as ``python <arguments>`` would, without options that change nothing after the start."""
    while arguments[0] in {"-P", "-u"}:
        del arguments[0]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


class _OneDevice(type):
    """Makes torch's groups of gloo in a process share a device. Else each has one, whose thread polls 100 times a second.

    The ranks that tests share hold hundreds of groups.
    """

    gloo: Any
    devices: dict[tuple[int, str | None], Any]
    """By process and interface: a forked process makes its own."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.gloo, name)

    def __call__(cls, store: Any, rank: int, size: int, *, timeout: Any) -> Any:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        here = os.getpid(), interface
        if here not in cls.devices:
            cls.devices[here] = (
                cls.gloo.create_device(interface=interface) if interface else cls.gloo.create_default_device()
            )
        options = cls.gloo._Options()
        options._devices, options._threads, options._timeout = [cls.devices[here]], 2, timeout
        return cls.gloo(store, rank, size, options)


def _share_gloo_device() -> None:
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    c10d.ProcessGroupGloo = _OneDevice("ProcessGroupGloo", (), {"gloo": c10d.ProcessGroupGloo, "devices": {}})


def _main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    sys.modules["fork_server"] = sys.modules["__main__"]
    # Ray's library reads the environment as it is loaded, that of the process and not this one's. vLLM would import it.
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in IMPORTS:
        importlib.import_module(name)
    del sys.modules["ray"], sys.modules["vllm.v1.executor.ray_utils"]  # which has found no Ray
    # vLLM's ranks look for work without a pause, and for a second after the last one: that takes the cores from everybody else.
    sys.modules["vllm.distributed.device_communicators.shm_broadcast"].sched_yield = lambda: time.sleep(_PAUSE_S)  # type: ignore[attr-defined]
    _share_gloo_device()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: one of the imports has started some, and they cannot be forked"
    install()
    # It finds out where the title is, which it cannot do any more in a process with another environment. Machines that fork
    # nothing need it not, and may not have it.
    importlib.import_module("setproctitle").getproctitle()
    gc.freeze()
    line.sendall(b"r")
    request = _serve(line)
    if request is None:
        os._exit(0)
    _run_to_its_end(request["arguments"])


if __name__ == "__main__":
    _main()
