"""Properties of the machine that affect the figures."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from weightlane.ckpt_engines.runtime.devices import numbered_device, runtime_of, usable_cpus

from .bench_report import Machine


def this_machine(device: str = "cpu") -> Machine:
    """Describe this machine, and its GPU if `device` is one, without names of hosts or users."""
    return Machine(
        cpu=_cpu(),
        cores=usable_cpus(),
        memory_bytes=_memory_bytes(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        weightlane=_own_version(),
        gpu=runtime_of(numbered_device(device)).name,
    )


def available_bytes(device: str = "cpu") -> int | None:
    """Return the free memory of `device`; None if the system does not report it."""
    free = runtime_of(numbered_device(device)).free_bytes()
    return _meminfo("MemAvailable:") if free is None else free


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _memory_bytes() -> int:
    return _meminfo("MemTotal:") or 0


def _meminfo(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _own_version() -> str:
    try:
        return version("weightlane")
    except PackageNotFoundError:  # weightlane runs from a source tree
        return "unknown"
