"""Telling from a file whether the process that wrote it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """A process, this one by default, so described that another one of the same host can tell whether it still lives."""
    pid = os.getpid() if pid is None else pid
    return {"host": socket.gethostname(), "pid_namespace": _pid_namespace(), "pid": pid, "started": _start_time(pid)}


def is_dead(identity: Mapping[str, Any]) -> bool:
    """Whether `identity` is of this host and its process is gone. What is not an identity is not dead."""
    try:
        here = (socket.gethostname(), _pid_namespace())
        if (identity["host"], identity["pid_namespace"]) != here or not identity["started"]:
            return False
        return _start_time(int(identity["pid"])) != str(identity["started"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it does not exist or the platform cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]
