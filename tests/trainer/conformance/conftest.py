"""Lets the suite fork its processes from one that has imported torch and transformers, which takes six CPU seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from fork_server import fork_python


class ForkedServer:
    """The part of `subprocess.Popen` that `weightlane.ckpt_engines.runtime.fork_server` uses."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        pass_fds: Collection[int],
        env: Mapping[str, str],
    ) -> None:
        assert (command[1], stdin) == ("-P", subprocess.DEVNULL)
        with Path(os.devnull).open() as nothing:
            descriptors = {
                0: nothing.fileno(),
                1: stdout.fileno(),
                2: stderr.fileno(),
                **{each: each for each in pass_fds},
            }
            self._pid = fork_python(command[2:], env, descriptors)

    def wait(self, timeout: float) -> None:
        del timeout  # it ends when its control socket closes
        os.waitpid(self._pid, 0)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


@pytest.fixture(autouse=True, scope="module")
def _forked_pools() -> Iterator[None]:
    forking: Any = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedServer})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightlane.ckpt_engines.runtime.fork_server.subprocess", forking)
        yield
