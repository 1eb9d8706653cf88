"""A running `weightlane train` that a benchmark watches, the processes below it, and what they must not leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import say

WEIGHTLANE = str(Path(sys.executable).with_name("weightlane"))
_REPLICA = "ray::ReplicaActor"
"""How `ps` shows a replica's process."""
_POLL_S, _LONGEST_S, _END_S = 0.5, 3000.0, 60.0
"""Seconds between two looks at a run; most seconds of a run; most seconds for its processes to end after it."""
Settings = Mapping[str, Mapping[str, object]]
"""Values of a run's configuration, by section and key."""


class WatchedRun:
    """A run of the configuration `config`, in which `settings` replace others. It writes its files to `directory`.

    The processes that `replicas` has seen are those whose end `left_behind` waits for.
    """

    def __init__(
        self,
        config: Path,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.directory, self._log = directory, directory.with_suffix(".log")
        chosen = [
            f"--set={part}.{key}={value}" for part, keys in (settings or {}).items() for key, value in keys.items()
        ]
        self._temporary = Path(tempfile.mkdtemp(prefix="wl-"))  # short: Ray's sockets lie in it
        with self._log.open("w") as out:
            command = [WEIGHTLANE, "train", str(config), "--plain", f"--set=run.dir={directory}", *chosen]
            own = {"TMPDIR": str(self._temporary), **(environment or {})}
            self._process = psutil.Popen(command, stdout=out, stderr=out, env=os.environ | own)
        self._end = time.monotonic() + _LONGEST_S
        self._seen: set[psutil.Process] = set()
        self._segments: set[int] = set()
        self.replica_pids: set[int] = set()
        """Those of all replicas that were ever seen."""

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Its events so far, in order; those of one name if that is given."""
        with suppress(FileNotFoundError):
            lines = (self.directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
            return [event for event in map(json.loads, lines) if name in ("", event["event"])]
        return []

    def replicas(self) -> list[psutil.Process]:
        """The processes of its replicas. All of its processes are noted, and the shared memory that they have mapped now."""
        found: list[psutil.Process] = []
        with suppress(psutil.Error):
            for each in self._process.children(recursive=True):
                self._seen.add(each)
                with suppress(psutil.Error, OSError):
                    found += [each] if "".join(each.cmdline()).startswith(_REPLICA) else []
                    maps = Path(f"/proc/{each.pid}/maps").read_text().splitlines()
                    self._segments |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}  # noqa: S108
        self.replica_pids |= {each.pid for each in found}
        return found

    def reaches(self, reached: Callable[[], bool]) -> bool:
        """Wait until `reached()`; False if the run ends before. Raises `TimeoutError` if all of it takes too long."""
        while not reached():
            if self._process.poll() is not None:
                return False
            if time.monotonic() > self._end:
                raise TimeoutError(f"the run is not over after {_LONGEST_S:.0f} s: {self._log.read_text()[-3000:]}")
            self.replicas()
            time.sleep(_POLL_S)
        return True

    def left_behind(self) -> Sequence[str]:
        """Wait for its end. Returns which processes, shared memory and files are left. Raises `CalledProcessError`."""
        self.reaches(lambda: False)
        if self._process.returncode:
            say(self._log.read_text()[-3000:])
            raise subprocess.CalledProcessError(self._process.returncode, WEIGHTLANE)
        _, alive = psutil.wait_procs(self._seen, _END_S)
        # By inode: a semaphore is mapped under another name than the one it has afterwards.
        segments = [each.path for each in os.scandir("/dev/shm") if each.inode() in self._segments]  # noqa: S108
        files = [str(each) for each in self._temporary.iterdir() if not each.name.startswith("torchinductor_")]
        return [*map(str, alive), *segments, *files]

    def close(self) -> None:
        """End whatever still lives, and remove its temporary files."""
        for each in [self._process, *self._seen]:
            with suppress(psutil.Error):
                each.kill()
        self._process.wait(_END_S)
        shutil.rmtree(self._temporary, ignore_errors=True)
