"""The fork server: children are cheap and separate, and end with the program that wanted them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.ckpt_engines.runtime.fork_server import ForkServer

CHILDREN = "forked_children"
"""The module whose functions run in the children."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    (tmp_path / "files").mkdir()
    made = ForkServer([CHILDREN], directory=tmp_path / "files", environment={"TMPDIR": str(tmp_path / "files")})
    yield made
    made.close()
    assert not (tmp_path / "files").exists()


def test_children_answer_end_with_their_socket_and_leave_what_they_wrote(server: ForkServer, tmp_path: Path) -> None:
    first, second = (server.fork(f"{CHILDREN}:echo", word) for word in ("one", "two"))
    for child, word in ((first, "one"), (second, "two")):
        child.socket.send({"n": 1})
        assert child.socket.receive(HANG_S) == {
            "said": word, "request": {"n": 1}, "pid": child.pid, "tmp": str(tmp_path / "files")
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


def test_children_end_with_the_server_and_later_ones_are_refused_with_a_typed_error(server: ForkServer) -> None:
    child = server.fork(f"{CHILDREN}:sleep")
    os.kill(int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: not child.alive, "end of a child whose server was killed")
    with pytest.raises(WorkerDiedError, match="no process can be started"):
        server.fork(f"{CHILDREN}:sleep")


def test_children_and_their_files_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    program = (
        "import json, time; from pathlib import Path\n"
        "from weightlane.ckpt_engines.runtime.fork_server import ForkServer\n"
        f"server = ForkServer([{CHILDREN!r}], directory=Path({str(tmp_path / 'files')!r}))\n"
        f"children = [server.fork({CHILDREN + ':sleep'!r}) for _ in range(2)]\n"
        "print(json.dumps([child.socket.receive()['pid'] for child in children]), flush=True)\n"
        f"time.sleep({NEVER_S})\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as owner:
        assert owner.stdout is not None
        pids = json.loads(owner.stdout.readline())
        owner.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the children")
    wait_until(lambda: not (tmp_path / "files").exists(), "end of their files")
