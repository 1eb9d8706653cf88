"""Lets Ray fork its workers: one that imports vLLM or torch for itself spends most of its CPU time on that.

A raylet starts each worker by a command. `fork_them` puts this file into that command. Run by the raylet, it sends what it was
given to a process that the driver has started, and ends. That process forks the worker, which is Ray's ordinary worker with the
arguments, the environment, the files and the blocked signals of the raylet's command. Ray knows a worker by what it registers
with, not by the process that the raylet started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import uuid
from typing import Any

ADDRESS_ENV = "WEIGHTLANE_TEST_RAY_WORKERS"
_FILES = (0, 1, 2)


def fork_them(services: Any) -> None:
    """Let every Ray that this process starts fork its workers, if this process was forked itself."""
    import functools
    import inspect

    start = services.start_raylet

    @functools.wraps(start)
    def start_raylet(*arguments: Any, **named: Any) -> Any:
        if (server := sys.modules.get("fork_server")) and server.has_server():
            os.environ[ADDRESS_ENV] = _start_server(server)
            bound = inspect.signature(start).bind(*arguments, **named)
            bound.arguments["setup_worker_path"] = __file__
            arguments, named = bound.args, bound.kwargs
        return start(*arguments, **named)

    services.start_raylet = start_raylet


def _start_server(server: Any) -> str:
    """Start the process that forks workers. It ends with this one, whose end closes the pipe."""
    address = f"wl-ray-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(64)
        ends, _open_until_this_process_ends = os.pipe()
        files = {number: number for number in (*_FILES, listener.fileno(), ends)}
        server.fork_python([__file__, "serve", str(listener.fileno()), str(ends)], os.environ, files)
        os.close(ends)
    return address


def _serve(listener: socket.socket, ends: int) -> None:
    import select

    import fork_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the workers are children of this process, and nobody waits for them
    while ends not in (ready := select.select([listener, ends], [], [])[0]):
        assert ready == [listener]
        connection, _ = listener.accept()
        with connection:
            head, files, *_ = socket.recv_fds(connection, 8, len(_FILES))
            asked = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
            worker = [__file__, "work", json.dumps(asked["blocked"]), *asked["arguments"]]
            fork_server.fork_python(worker, asked["env"], dict(zip(_FILES, files, strict=True)), cwd=asked["cwd"])
            connection.sendall(b"f")
            for number in files:
                os.close(number)


def _ask(arguments: list[str]) -> None:
    blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    request = {"arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd(), "blocked": blocked}  # noqa: PTH109
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(f"\0{os.environ[ADDRESS_ENV]}")
        socket.send_fds(line, [len(data).to_bytes(8, "big")], list(_FILES))
        line.sendall(data)
        assert line.recv(1) == b"f", "the process that forks Ray's workers has ended"


def _work(blocked: list[int], arguments: list[str]) -> None:
    """Be a worker, as ``ray/_private/workers/setup_worker.py`` would start it."""
    import argparse
    import runpy

    import setproctitle
    from ray import _raylet
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    _raylet.setproctitle = setproctitle.setproctitle  # Ray's own cannot find where the title is in a forked process
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, worker = parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context)
    assert context.py_executable == sys.executable, context
    assert not context.command_prefix, context
    update_envs(context.env_vars)
    sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.argv = worker
    runpy.run_path(worker[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
    elif sys.argv[1] == "work":
        _work(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        _ask(sys.argv[1:])
