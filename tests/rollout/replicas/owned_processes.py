"""An owner that starts a child which watches it, as vLLM's process tree does. Processes that are spawned can import it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection

from waiting import HANG_S

from weightlane.rollout.vllm.watchdog import WATCH_ENV, watch_parent


def be_watched(connection: Connection) -> None:
    assert watch_parent()
    assert watch_parent()  # once more changes nothing
    assert sum(thread.name == "weightlane-parent-watch" for thread in threading.enumerate()) == 1
    connection.send(os.getpid())
    time.sleep(HANG_S)


def own_a_child(connection: Connection) -> None:
    assert not watch_parent()  # without an owner nothing is watched
    os.environ[WATCH_ENV] = str(os.getpid())
    assert not watch_parent()  # the owner itself is not watched
    process = multiprocessing.get_context("spawn").Process(target=be_watched, args=(connection,))
    process.start()
    time.sleep(HANG_S)
