"""The fork server: children are cheap and separate, and end with the program that wanted them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.ckpt_engines.runtime.fork_server import ForkServer

CHILDREN = "forked_children"
"""The module whose functions run in the children."""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory of the children's files."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def test_children_are_separate_and_end_with_their_socket_by_a_kill_and_with_their_server(files: Path) -> None:
    server = ForkServer([CHILDREN], directory=files, environment={"TMPDIR": str(files)})
    first, second = (server.fork(f"{CHILDREN}:echo", word) for word in ("one", "two"))
    for child, word in ((first, "one"), (second, "two")):
        child.socket.send({"n": 1})
        assert child.socket.receive(HANG_S) == {
            "said": word, "request": {"n": 1}, "pid": child.pid, "tmp": str(files)
        }  # fmt: skip
    first.socket.close()
    wait_until(lambda: not first.alive, "end of a child whose socket is closed")
    failing = server.fork(f"{CHILDREN}:fail")
    assert failing.socket.receive(HANG_S) is None
    assert "LookupError: nobody is at home" in failing.output()
    assert second.alive
    second.kill()
    second.kill()
    assert not second.alive
    last = server.fork(f"{CHILDREN}:sleep")
    os.kill(int(Path(f"/proc/{last.pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: not last.alive, "end of a child whose server was killed")
    with pytest.raises(WorkerDiedError, match="no process can be started"):
        server.fork(f"{CHILDREN}:sleep")
    server.close()
    assert not files.exists()


def test_children_and_their_files_end_with_a_program_that_is_killed(files: Path, forks: ForkServer) -> None:
    program = forks.fork(f"{CHILDREN}:own_server", str(files))
    answer = program.socket.receive(HANG_S)
    assert answer is not None, program.output()
    program.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in answer["pids"]), "end of the children")
    wait_until(lambda: not files.exists(), "end of their files")
