"""A `weightlane train` process under test, everything it starts, and what it must not leave behind."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from fork_server import ForkedPopen, has_server
from waiting import HANG_S, wait_until

MARKER = "WEIGHTLANE_TEST_RUN"
_POLL_S = 0.2
"""Looking at every process of the machine takes its time, too."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended by itself, and what Prometheus saw of it while it trained."""

    config: Path
    run_dir: Path
    out: str
    samples: dict[str, float]
    scraped_again: Exception | None
    """How an attempt to see more after its end failed."""


class RunProcess:
    """Starts the command in a session of its own, as a terminal does, and knows its processes by what they inherit.

    That is a marker in the environment with which a program begins, or, for processes that are forked, the working directory.
    """

    def __init__(self, arguments: Sequence[str], logs: Path, *, forked: bool = True) -> None:
        self._marker = uuid.uuid4().hex
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        # Ray's sockets lie in the temporary directory, so its path must be short; what is in it at the end was left behind.
        self.temporary = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp"))
        self._home = logs / "home"
        self._home.mkdir(exist_ok=True)
        self._segments: set[Path] = set()
        # torch keeps compiled code in the temporary directory; runs of all tests share one cache.
        user = getpass.getuser()
        caches = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
        caches.mkdir(exist_ok=True)
        (self.temporary / f"torchinductor_{user}").symlink_to(caches)
        env = {
            **os.environ,
            MARKER: self._marker,
            "HOME": str(self._home),
            "TMPDIR": str(self.temporary),
            # Processes that set their title would overwrite the environment that /proc shows, and the marker in it.
            "SPT_NOENV": "1",
            "COLUMNS": "200",
        }
        start = ForkedPopen if forked and has_server() else subprocess.Popen
        with (logs / "out").open("wb") as out, (logs / "err").open("wb") as err:
            self._process = start(
                [sys.executable, str(Path(sys.executable).with_name("weightlane")), *arguments],
                env=env,
                cwd=str(logs),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return (self._logs / "out").read_text()

    @property
    def err(self) -> str:
        return (self._logs / "err").read_text()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (
                    process.environ().get(MARKER) == self._marker or process.cwd() == str(self._logs)
                ):
                    found.append(process)
        return found

    def named(self, title: str) -> list[psutil.Process]:
        """The run's processes whose title or command line contains `title`."""
        return [process for process in self.processes() if title in _title(process)]

    def note_segments(self) -> None:
        """Remember the shared memory that processes of the run have mapped now."""
        mapped: set[int] = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        # By inode: a semaphore is mapped under another name than the one it has afterwards.
        for segment in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):
                if segment.stat().st_ino in mapped:
                    self._segments.add(segment)

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Poll until `reached()`; fails at once when the run ends before."""

        def reached_or_over() -> bool:
            code = self._process.poll()
            assert code is None or reached(), f"ended with {code} before {what}:\n{self.out}\n{self.err}"
            return reached()

        wait_until(reached_or_over, f"{what}; it printed to {self._logs}", poll_s=_POLL_S)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the run has printed `text`, so many times."""
        self.wait_until(lambda: self.out.count(text) >= times, f"{text!r} {times} times")

    def kill(self, title: str) -> int:
        """SIGKILL the run's only process called `title`; returns its id."""
        victims = self.named(title)
        assert len(victims) == 1, [_title(process) for process in self.processes()]
        self.kill_process(victims[0].pid)
        return victims[0].pid

    def kill_process(self, pid: int) -> None:
        """SIGKILL one process of the run."""
        self.note_segments()
        os.kill(pid, signal.SIGKILL)

    def interrupt(self, number: signal.Signals, *, whole_group: bool = False) -> None:
        """Send a signal to the command, or, as a terminal does, to its whole process group."""
        self.note_segments()
        (os.killpg if whole_group else os.kill)(self._process.pid, number)

    def end(self) -> Ended:
        """Wait for the end, and check that nothing of the run is left."""
        try:
            code = self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            tree = [f"{process.pid} {_title(process)}" for process in self.processes()]
            raise AssertionError(f"not over after {HANG_S} s:\n{self.out}\n{self.err}\n{tree}") from None
        self._check_nothing_left()
        ended = Ended(code, self.out, self.err)  # and so of every process, which may print after the command has ended
        assert "Traceback" not in ended.out + ended.err, ended.err
        return ended

    def _check_nothing_left(self) -> None:
        # vLLM's children look for their parent twice a second.
        wait_until(
            lambda: not self.processes(), f"end of all processes that have {MARKER}={self._marker}", poll_s=_POLL_S
        )
        segments = [str(path) for path in self._segments if path.exists()]
        assert not segments, f"left in shared memory: {segments}"
        files = sorted(path.name for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_"))
        assert not files, f"left in the temporary directory: {files[:20]}"

    def reap(self) -> None:
        """Kill whatever is left, whether or not the test passed."""
        for _ in range(3):
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self._process.kill()
        self._process.wait(10)
        shutil.rmtree(self.temporary, ignore_errors=True)
        for segment in self._segments:
            segment.unlink(missing_ok=True)


StartRun = Callable[..., RunProcess]


def starting(folder: Path) -> Iterator[StartRun]:
    """A fixture that starts ``weightlane <arguments>``; whatever is left of it is killed after the test.

    The run and its Ray workers are forked from processes that have imported vLLM and torch, unless `forked` is false.
    """
    started: list[RunProcess] = []

    def start(arguments: Sequence[str], *, forked: bool = True) -> RunProcess:
        started.append(RunProcess(arguments, folder / f"run-{len(started)}", forked=forked))
        return started[-1]

    yield start
    for run in started:
        run.reap()


"""The fixture `start_run`."""


def events_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Every event called `name` of a run, in order, also while the run writes the next one."""
    written, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")
    events = [json.loads(line) for line in written.splitlines()]
    return [event for event in events if event["event"] == name]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return "?"
