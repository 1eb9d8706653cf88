"""Counts of this process's resources, which must not grow, and of how often it unpickles. Read from ``/proc``: Linux only."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .network import TCP_LISTEN, descriptor_targets, socket_rows

_TCP_TABLES = ("tcp", "tcp6")
_UDP_TABLES = ("udp", "udp6")
_FABRIC_DEVICES = ("/dev/infiniband", "/dev/cxi", "/dev/hfi1", "/dev/efa")


def of_this_process() -> dict[str, int]:
    """Count the open descriptors, listening ports, threads, child processes and shared mappings of this process."""
    targets = descriptor_targets("self")
    rows = (fields for table in _TCP_TABLES for fields in socket_rows("self", table))
    listening = {f"socket:[{fields[9]}]" for fields in rows if fields[3] == TCP_LISTEN}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    tasks = list(Path("/proc/self/task").iterdir())
    return {
        "descriptors": len(targets),
        "listening ports": sum(target in listening for target in targets),
        "threads": len(tasks),
        "child processes": sum(len(_children(task)) for task in tasks),
        "shared mappings": sum(" rw-s " in line or " r--s " in line or "/dev/shm" in line for line in maps),  # noqa: S108
    }


def network_descriptors() -> int:
    """Count the descriptors of this process that could reach another host: internet sockets, and devices of a fabric."""
    rows = (fields for table in (*_TCP_TABLES, *_UDP_TABLES) for fields in socket_rows("self", table))
    internet = {f"socket:[{fields[9]}]" for fields in rows}
    return sum(target in internet or target.startswith(_FABRIC_DEVICES) for target in descriptor_targets("self"))


def _children(task: Path) -> list[str]:
    with contextlib.suppress(OSError):  # the thread has ended
        return (task / "children").read_text(encoding="ascii").split()
    return []


class UnpicklingCounter:
    """Replaces `pickle.load`, `pickle.loads` and `pickle.Unpickler` when it is constructed, and counts loads in `count`."""

    def __init__(self) -> None:
        self.count = 0
        counter = self

        class CountedUnpickler(pickle.Unpickler):
            def load(self) -> Any:
                counter.count += 1
                return super().load()

        pickle.load, pickle.loads = self._counted(pickle.load), self._counted(pickle.loads)
        pickle.Unpickler = CountedUnpickler  # type: ignore[misc]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        return wrapper
