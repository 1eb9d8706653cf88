"""Functions that `test_fork_server.py` runs in forked children, which import them from here."""

from __future__ import annotations

import os
import time
from pathlib import Path

from waiting import NEVER_S

from weightlane.ckpt_engines.runtime.fork_server import ForkServer
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket


def echo(requests: JsonSocket, greeting: str) -> None:
    """Run in a child: answer every request with its sender's words."""
    while (request := requests.receive()) is not None:
        requests.send({"said": greeting, "request": request, "pid": os.getpid(), "tmp": os.environ["TMPDIR"]})


def fail(_: JsonSocket) -> None:
    """Run in a child: fail."""
    raise LookupError("nobody is at home")


def sleep(requests: JsonSocket) -> None:
    """Run in a child: report that it is there, and stay."""
    requests.send({"pid": os.getpid()})
    time.sleep(NEVER_S)


def own_server(requests: JsonSocket, directory: str) -> None:
    """Run in a child: start a fork server and two children of it, report their process ids, and stay."""
    server = ForkServer([__name__], directory=Path(directory))
    children = [server.fork(f"{__name__}:sleep") for _ in range(2)]
    requests.send({"pids": [child.socket.receive()["pid"] for child in children]})
    time.sleep(NEVER_S)
