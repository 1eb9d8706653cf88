"""`TransferTasks`: the threads that receive and relay one version, one for each link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import NamedTuple

from weightlane.ckpt_engines import Deadline
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads


class TransferTask(NamedTuple):
    """The transfers of one version on one link, with the `peers` at the link's other end."""

    peers: Sequence[str]
    run: Callable[[], None]


class TransferTasks:
    """Runs the transfer tasks of one version after another for the participant `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._late: list[Future[None]] = []
        """Tasks that had not ended when the last `run` raised."""

    def run(self, tasks: Sequence[TransferTask], deadline: Deadline) -> None:
        """Run `tasks` concurrently, each on its own thread. Returns when all have ended.

        Raises the first error of a task at once; the other tasks end when the session is closed. Raises
        `DeadlineExceededError` naming the peers if a call of the engine outlives its deadline.
        """
        if not tasks:
            return
        threads = DaemonThreads(len(tasks), f"weightlane-receive-{self._name}")
        running = [threads.submit(task.run) for task in tasks]
        threads.shutdown(wait=False)
        done, late = wait(running, deadline.remaining_s + GRACE_S, FIRST_EXCEPTION)
        self._late = list(late)
        for each in done:
            each.result()
        if late:
            peers = [peer for task, future in zip(tasks, running, strict=True) if future in late for peer in task.peers]
            raise deadline.error("buckets", part=self._name, peer=", ".join(peers))

    def wait_until_idle(self, deadline: Deadline) -> None:
        """Wait until no task of an earlier `run` uses its memory any more. Raises `DeadlineExceededError`."""
        if wait(self._late, deadline.remaining_s).not_done:
            raise deadline.error("an earlier version's buckets to be given up", part=self._name)
        self._late = []
