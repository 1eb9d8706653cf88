"""Settings for the tests with other packages' environments, whose warnings are not ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[[int], str]]:
    """Starts servers of openenv with so many sessions. Returns the address of one, before the server answers there."""
    started = []

    def start(sessions: int) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = [sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(port), str(sessions)]
        started.append(subprocess.Popen(program))
        return f"http://127.0.0.1:{port}"

    yield start
    for server in started:
        server.kill()
        server.wait()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")
