"""Identities of processes, by which a reader of a file can tell whether the process that wrote it is still alive."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_identity() -> dict[str, Any]:
    """Return the identity of this process. Any process of the same host can pass it to `is_dead`."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid_namespace": _pid_namespace(), "pid": pid, "started": _start_time(pid)}


def is_dead(identity: Mapping[str, Any], *, elsewhere: bool = False) -> bool:
    """Tell whether `identity` is that of a process of this host that has ended; False if it is malformed.

    `elsewhere` is the answer for a process of another host or container.
    """
    try:
        here = (socket.gethostname(), _pid_namespace())
        if (identity["host"], identity["pid_namespace"]) != here:
            return elsewhere
        return bool(identity["started"]) and _start_time(int(identity["pid"])) != str(identity["started"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty when it has ended or the platform cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]
