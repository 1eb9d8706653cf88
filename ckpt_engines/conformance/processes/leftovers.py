"""Counts of a process's resources, which must not grow. Read from ``/proc``: Linux only."""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTEN = "0A"
_NETWORK_TABLES = ("tcp", "tcp6", "udp", "udp6")
_FABRIC_DEVICES = ("/dev/infiniband", "/dev/cxi", "/dev/hfi1", "/dev/efa")


def of_this_process() -> dict[str, int]:
    """Count the open descriptors, listening ports, threads, child processes and shared mappings of this process."""
    targets = _descriptors()
    listening = {inode for table in _NETWORK_TABLES[:2] for inode, state in _sockets(table).items() if state == _LISTEN}
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
    targets = _descriptors()
    internet = {inode for table in _NETWORK_TABLES for inode in _sockets(table)}
    return sum(target in internet or target.startswith(_FABRIC_DEVICES) for target in targets)


def _descriptors() -> list[str]:
    targets = []
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            targets.append(str(descriptor.readlink()))
    return targets


def _sockets(table: str) -> dict[str, str]:
    """Return the state of every internet socket by its name in ``/proc/self/fd``."""
    try:
        rows = Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    except OSError:  # no IPv6 here
        return {}
    return {f"socket:[{fields[9]}]": fields[3] for fields in map(str.split, rows)}


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text(encoding="ascii").split()
    except OSError:
        return []
