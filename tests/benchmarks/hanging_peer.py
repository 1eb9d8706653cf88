"""A peer's processes that hang, and have started others in a session of their own."""

from __future__ import annotations

import subprocess
import time
from functools import partial

from benchmarks.peers.methods import PeerMethods
from weightlane.cli.bench.processes import worker


class HangingMethods(PeerMethods):
    def open_copies(self) -> None:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)

    def copy_aside(self, at: float) -> tuple[float, float]:
        time.sleep(3600)
        return at, at


serve = partial(worker.serve, kind=HangingMethods)
