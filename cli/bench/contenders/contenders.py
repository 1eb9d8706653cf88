"""The references that weightlane is measured against: plain copies, bare transports, and a blocking sync.

A contender is a context manager. It connects, warms up, and yields a function that measures one round. It frees what it took
unless a round has failed, which ends the benchmark. Where memory is scarce it is entered for one round only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from weightlane.sync.control.rendezvous import Rendezvous

from ..processes.processes import Processes, meeting_point
from ..processes.worker import Span

Figures = dict[str, float]
"""Seconds (or bytes) of one round, by name."""
Round = Callable[[], Figures]
Contender = Callable[[], AbstractContextManager[Round]]
COPIES, BLOCKING, FILES = "limits", "blocking", "files"
"""Names of the contenders that are not rows: keys of their figures."""


@contextmanager
def copies(processes: Processes, timeout_s: float) -> Iterator[Round]:
    """Copies of the full payload within memory, which no transport can beat."""

    def measure() -> Figures:
        alone = processes.receivers[0].call("copy_aside", meeting_point(), timeout_s=timeout_s)
        together = processes.every_receiver("copy_aside", meeting_point(), timeout_s=timeout_s)
        into = processes.sender.call("copy_in", timeout_s=timeout_s)
        out = processes.every_receiver("copy_out", meeting_point(), timeout_s=timeout_s)
        return {
            "memcpy_s": duration_s([alone]),
            # As for commits: the duration of the slowest copy, whenever each starts.
            "memcpy_all_receivers_s": max(end - start for start, end in together),
            "copy_in_then_out_s": duration_s([into]) + duration_s(out),
        }

    processes.every("open_copies", timeout_s=timeout_s)
    measure()
    yield measure
    processes.every("close_copies", timeout_s=timeout_s)


@contextmanager
def gloo(processes: Processes, timeout_s: float, bucket_bytes: int) -> Iterator[Round]:
    """A flat gloo broadcast, the limit of the engine `gloo`, and a blocking sync in buckets on the same group."""

    def measure() -> Figures:
        flat, blocked = (
            processes.every(method, meeting_point(), timeout_s=timeout_s + 5) for method in ("broadcast", "block")
        )
        sender, *receivers = blocked
        started, ended = min(start for start, _ in blocked), max(end for _, end in receivers)
        return {
            "broadcast_s": duration_s(flat),
            "trainer_blocked_s": sender[1] - started,
            "rollout_blocked_s": ended - started,
            "latency_s": ended - sender[0],
        }

    rendezvous = Rendezvous.host()
    group = rendezvous.address.to_plain(), 1 + len(processes.receivers), bucket_bytes, timeout_s
    processes.every("open_gloo", *group, timeout_s=timeout_s + 5)
    measure()
    yield measure
    processes.every("close_gloo", timeout_s=timeout_s)
    rendezvous.close()


@contextmanager
def files(processes: Processes, timeout_s: float, path: Path) -> Iterator[Round]:
    """A safetensors file that the sender saves and every receiver loads, through the page cache."""

    def measure() -> Figures:
        saved = processes.sender.call("save", str(path), timeout_s=timeout_s)
        loaded = processes.every_receiver("load", str(path), meeting_point(), timeout_s=timeout_s)
        return {"files_s": duration_s([saved]) + duration_s(loaded)}

    measure()
    yield measure
    path.unlink(missing_ok=True)


def duration_s(spans: list[Span]) -> float:
    """Return the time from the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


RAW: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "gloo": (BLOCKING, lambda figures: figures["broadcast_s"]),
    "shm": (COPIES, lambda figures: figures["copy_in_then_out_s"]),
    "cuda_ipc": (COPIES, lambda figures: figures["memcpy_s"] + figures["memcpy_all_receivers_s"]),
    "filesystem": (FILES, lambda figures: figures["files_s"]),
}
"""The bare transport of each engine: the contender that measures it, and its seconds among the figures of a round."""
