"""Properties of the machine that affect the figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.devices import numbered_device, runtime_of
from weightlane.ckpt_engines.runtime.process_memory import available_memory_bytes

from .bench_report import Machine


def this_machine(device: str) -> Machine:
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


def available_bytes(device: str) -> int | None:
    """Return the free memory of `device`; None if the system does not report it."""
    free = runtime_of(numbered_device(device)).free_bytes()
    return available_memory_bytes() if free is None else free


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _own_version() -> str:
    try:
        return version("weightlane")
    except PackageNotFoundError:  # weightlane runs from a source tree
        return "unknown"
