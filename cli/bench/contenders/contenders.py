"""The references that weightlane is measured against: plain copies, bare transports, and a blocking sync.

A contender is opened, measured for any number of rounds, and closed. Where memory is scarce it is opened for one round only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from weightlane.sync.control.rendezvous import Rendezvous

from ..processes.processes import Processes, meeting_point
from ..processes.worker import Span

Figures = dict[str, float]
"""Seconds (or bytes) of one round, by name."""


class Contender(Protocol):
    """A transport of the weights whose rounds are measured."""

    @property
    def name(self) -> str:
        """The key of its figures."""

    def open(self) -> None:
        """Connect and warm up."""

    def round(self) -> Figures:
        """Measure one round."""

    def close(self) -> None:
        """Free everything that `open` took."""


class Copies:
    """Copies of the full payload within memory, which no transport can beat."""

    name = "limits"

    def __init__(self, processes: Processes, timeout_s: float) -> None:
        self._processes = processes
        self._timeout_s = timeout_s

    def open(self) -> None:
        """See `Contender.open`."""
        self._processes.every("open_copies", timeout_s=self._timeout_s)
        self.round()

    def round(self) -> Figures:
        """See `Contender.round`."""
        processes, timeout_s = self._processes, self._timeout_s
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

    def close(self) -> None:
        """See `Contender.close`."""
        self._processes.every("close_copies", timeout_s=self._timeout_s)


class Gloo:
    """A flat gloo broadcast, the limit of the engine `gloo`, and a blocking sync on the same group.

    Args:
        processes: The participants.
        timeout_s: Longest time of each call, in seconds.
        bucket_bytes: Size of the blocking sync's buckets.
    """

    name = "blocking"

    def __init__(self, processes: Processes, timeout_s: float, bucket_bytes: int) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._rendezvous: Rendezvous | None = None

    def open(self) -> None:
        """See `Contender.open`."""
        self._rendezvous = Rendezvous.host()
        world = 1 + len(self._processes.receivers)
        address = self._rendezvous.address.to_plain()
        self._processes.every(
            "open_gloo", address, world, self._bucket_bytes, self._timeout_s, timeout_s=self._timeout_s + 5
        )
        self.round()

    def round(self) -> Figures:
        """See `Contender.round`."""
        flat = self._every("broadcast")
        sender, *receivers = blocked = self._every("block")
        started = min(start for start, _ in blocked)
        return {
            "broadcast_s": duration_s(flat),
            "trainer_blocked_s": sender[1] - started,
            "rollout_blocked_s": max(end for _, end in receivers) - started,
            "latency_s": max(end for _, end in receivers) - sender[0],
        }

    def close(self) -> None:
        """See `Contender.close`."""
        self._processes.every("close_gloo", timeout_s=self._timeout_s)
        self._rendezvous = None

    def _every(self, method: str) -> list[Span]:
        spans: list[Span] = self._processes.every(method, meeting_point(), timeout_s=self._timeout_s + 5)
        return spans


class Files:
    """A safetensors file that the sender saves and every receiver loads, through the page cache."""

    name = "files"

    def __init__(self, processes: Processes, timeout_s: float, directory: Path) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._path = directory / "limit.safetensors"

    def open(self) -> None:
        """See `Contender.open`."""
        self.round()

    def round(self) -> Figures:
        """See `Contender.round`."""
        saved = self._processes.sender.call("save", str(self._path), timeout_s=self._timeout_s)
        loaded = self._processes.every_receiver("load", str(self._path), meeting_point(), timeout_s=self._timeout_s)
        return {"files_s": duration_s([saved]) + duration_s(loaded)}

    def close(self) -> None:
        """See `Contender.close`."""
        self._path.unlink(missing_ok=True)


def duration_s(spans: list[Span]) -> float:
    """Return the time from the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)


RAW: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "gloo": (Gloo.name, lambda figures: figures["broadcast_s"]),
    "shm": (Copies.name, lambda figures: figures["copy_in_then_out_s"]),
    "cuda_ipc": (Copies.name, lambda figures: figures["memcpy_s"] + figures["memcpy_all_receivers_s"]),
    "filesystem": (Files.name, lambda figures: figures["files_s"]),
}
"""The bare transport of each engine: the contender that measures it, and its seconds among the figures of a round."""


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an engine's options that JSON can represent."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
