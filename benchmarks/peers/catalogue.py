"""All rows of the comparison: plain copies, which are the limits of everybody on one machine, weightlane itself, and others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

from weightlane.cli.bench.contenders.contenders import Figures, Round, duration_s
from weightlane.cli.bench.contenders.weightlane_contender import RowContender, RowFacts
from weightlane.cli.bench.processes.participants import sync_config
from weightlane.cli.bench.processes.processes import Processes, meeting_point
from weightlane.cli.bench.processes.worker import Span
from weightlane.sync import Rendezvous


class PeerProcesses(Processes):
    """One sender and its receivers, with the methods of peers."""

    worker: ClassVar[str] = f"{__package__}.methods"


@dataclass(frozen=True)
class Turn:
    """A peer's turn: processes of its own, and empty folders on tmpfs and on a disk, which are gone afterwards."""

    processes: PeerProcesses
    timeout_s: float
    memory_dir: Path
    disk_dir: Path

    def sender(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sender."""
        return self.processes.sender.call(method, *arguments, timeout_s=self.timeout_s)

    def receivers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all receivers at once."""
        return self.processes.every_receiver(method, *arguments, timeout_s=self.timeout_s)

    def every(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all processes at once."""
        return self.processes.every(method, *arguments, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Peer:
    """A row of the comparison; its processes get `environment`."""

    name: str
    through: Literal["memory", "network", "files"]
    """Medium of the weights: only rows with the same can replace one another."""
    what: str
    """Description of how it carries the weights, for the list."""
    opened: Callable[[Turn], AbstractContextManager[Round]]
    """Connects the processes, and yields what makes one exchange."""
    group: Literal["limit", "weightlane", "peer"] = "peer"
    packages: tuple[str, ...] = ("torch",)
    """Distributions whose versions belong to the row."""
    modules: tuple[str, ...] = ()
    """Imports beyond torch."""
    install: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def versions(self) -> dict[str, str]:
        """The installed version of each of `packages`."""
        installed = {each.name: each.version for each in metadata.distributions()}
        return {package: installed[package] for package in self.packages if package in installed}


def pushed_s(sender: Span, receivers: list[Span]) -> Figures:
    """The figures of an exchange in which all take part at once, each from the begin to the end of its span."""
    return _figures(sender, receivers, duration_s([sender, *receivers]))


def pulled_s(sender: Span, receivers: list[Span]) -> Figures:
    """The figures of an exchange in which receivers begin when the sender has ended: the time to tell them does not count."""
    return _figures(sender, receivers, duration_s([sender]) + duration_s(receivers))


def _figures(sender: Span, receivers: list[Span], latency_s: float) -> Figures:
    rollout_s = max(end - start for start, end in receivers)
    return {"trainer_blocked_s": sender[1] - sender[0], "rollout_blocked_s": rollout_s, "latency_s": latency_s}


@contextmanager
def _copies(turn: Turn, method: str) -> Iterator[Round]:
    """Copies within each process, by `all` receivers at once or by `one`; or `in` shared memory and out of it."""

    def exchange() -> Figures:
        if method == "in":
            return pulled_s(turn.sender("copy_in"), turn.receivers("copy_out", meeting_point()))
        if method == "all":
            return pulled_s((0.0, 0.0), turn.receivers("copy_aside", meeting_point()))
        one = turn.processes.receivers[0]
        return pulled_s((0.0, 0.0), [one.call("copy_aside", meeting_point(), timeout_s=turn.timeout_s)])

    turn.every("open_copies")
    yield exchange
    turn.every("close_copies")


@contextmanager
def _gloo(turn: Turn, method: str, *arguments: float) -> Iterator[Round]:
    def exchange() -> Figures:
        sender, *receivers = turn.every(method, meeting_point(), *arguments)
        return pushed_s(sender, receivers)

    with closing(Rendezvous.host()) as rendezvous:
        turn.every("open_gloo", rendezvous.address.to_plain(), len(turn.processes.pids), 1, turn.timeout_s)
        yield exchange
        turn.every("close_gloo")


@contextmanager
def _files(turn: Turn, *, tmpfs: bool) -> Iterator[Round]:
    path = str((turn.memory_dir if tmpfs else turn.disk_dir) / "round")

    def exchange() -> Figures:
        return pulled_s(turn.sender("save", path), turn.receivers("load", path, meeting_point()))

    yield exchange


@contextmanager
def _ray(turn: Turn) -> Iterator[Round]:
    turn.receivers("ray_join", turn.sender("ray_start", len(turn.processes.pids)))
    yield lambda: pulled_s(turn.sender("ray_put"), turn.receivers("ray_get", meeting_point()))
    for stop in (turn.receivers, turn.sender):
        stop("ray_stop")


@contextmanager
def _nixl(turn: Turn) -> Iterator[Round]:
    sender, *receivers = turn.every("nixl_start")
    turn.receivers("nixl_meet", [sender])
    turn.sender("nixl_meet", receivers)

    def exchange() -> Figures:
        spans = turn.every("nixl_exchange", meeting_point(), len(receivers), turn.timeout_s)
        return pushed_s(spans[0], spans[1:])

    yield exchange
    turn.every("nixl_stop")


@contextmanager
def _weightlane(turn: Turn, engine: str, integrity: str) -> Iterator[Round]:
    """A run's own steps: publish, fence, transfer into staging, and a commit that copies into the live tensors.

    There is no training step between publish and fence: the trainer is blocked for the whole snapshot.
    """
    options = {"path": str(turn.disk_dir / "versions"), "keep_versions": 1} if engine == "filesystem" else {}
    config = sync_config(codec="dense", integrity=integrity, bucket_mib=None, deadline_s=turn.timeout_s)
    facts = RowFacts(engine, "dense", integrity, options, config)
    with asyncio.Runner() as runner:
        row = RowContender(facts, turn.processes, runner, density=1.0, step_s=0.0, timeout_s=turn.timeout_s)
        with row.opened() as exchange:
            yield exchange


_COPY = "one process copies the payload once, pages touched before"
_LO = {"GLOO_SOCKET_IFNAME": "lo"}
_FILES: dict[str, Any] = {
    "packages": ("safetensors",), "modules": ("safetensors.torch",), "install": "pip install safetensors"
}  # fmt: skip
_NIXL: dict[str, Any] = {
    "packages": ("nixl", "nixl-cu12"), "modules": ("nixl._api",), "install": "pip install --no-deps nixl nixl-cu12"
}  # fmt: skip
_RAY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # fmt: skip
_RAY_PUTS = "ray.put of one dictionary of numpy views; ray.get, copy out"
_ROWS = (
    Peer("memcpy", "memory", _COPY, partial(_copies, method="one"), "limit"),
    Peer("memcpy-all", "memory", "every receiver does so at once", partial(_copies, method="all"), "limit"),
    Peer("copy-in-then-out", "memory", "through shared memory", partial(_copies, method="in"), "limit"),
    *(
        Peer(
            f"weightlane-{engine}{suffix}",
            through,
            f"{how}; {checked}",
            partial(_weightlane, engine=engine, integrity=integrity),
            "weightlane",
            ("weightlane",),
        )
        for engine, through, how in (
            ("shm", "memory", "buckets in shared memory"),
            ("gloo", "network", "buckets broadcast over gloo"),
            ("filesystem", "files", "files through the page cache"),
        )
        for suffix, integrity, checked in (
            ("", "full", "every bucket checksummed on both sides"),
            ("-unchecked", "off", "integrity off, as with every peer"),
        )
    ),
    Peer("ray-object-store", "memory", _RAY_PUTS, _ray, "peer", ("ray",), ("ray",), "pip install ray", _RAY),
    Peer("nixl", "memory", "READ into the receivers' tensors, UCX picks the transport", _nixl, **_NIXL),
    Peer("nixl-tcp", "network", "the same with UCX_TLS=tcp", _nixl, **_NIXL, environment={"UCX_TLS": "tcp"}),
    Peer(
        "gloo-async",
        "network",
        "a broadcast for each tensor, all started at once",
        lambda turn: _gloo(turn, "broadcast_each", turn.timeout_s),
        environment=_LO,
    ),
    Peer(
        "gloo-flat", "network", "a broadcast of one flat buffer", lambda turn: _gloo(turn, "broadcast"), environment=_LO
    ),
    Peer("safetensors-page-cache", "files", "save_file, load_file, copy", partial(_files, tmpfs=False), **_FILES),
    Peer("safetensors-tmpfs", "files", "the same on tmpfs", partial(_files, tmpfs=True), **_FILES),
)
CATALOGUE = {peer.name: peer for peer in _ROWS}
"""All rows by name."""
