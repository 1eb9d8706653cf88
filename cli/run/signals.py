"""The end of a run: signals cancel it, also while Ray starts, and after a failure the logs' directory is printed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from weightlane.ckpt_engines import WeightlaneError

from .ray_cluster import RayCluster

_SIGNALS_S = 0.05
"""Seconds in which the event loop handles a signal that arrived while it was blocked."""


@contextmanager
def point_to_logs(logs: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Print the directory of the cluster's logs when the run fails."""
    try:
        yield
    except Exception:
        if logs.is_dir():
            say(f"logs of the run's processes: {logs}")
        raise


async def start_ray(stack: AsyncExitStack, cluster: RayCluster) -> RayCluster:
    """Enter `cluster`. A signal that arrives meanwhile cancels the run, even if it makes Ray's start fail."""
    try:
        entered = stack.enter_context(cluster)
    except WeightlaneError:
        await asyncio.sleep(_SIGNALS_S)  # raises CancelledError if there was a signal
        raise
    cancel_on_sigterm()  # again, because Ray sets a handler of its own
    return entered


def cancel_on_sigterm() -> None:
    """Let SIGTERM end the run as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
