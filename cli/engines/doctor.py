"""``weightlane doctor``: the hardware and software of this machine, what will not work on it, and the remedies."""

from __future__ import annotations

import platform
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.threads import within

from ..extras import COMMANDS, Library, extras_of_users, how_to_install_extra, library_of, listed_by, members

_PROBE_S = 300.0
"""Longest time of one probe; that of engines includes the checks of all of them. A hanging library costs only its own row."""
_GB = 1e9
_LEAST_SHM_BYTES = 512 << 20
"""Free shared memory that vLLM's ranks and Ray need. A container has 64 MiB by default."""
_LEAST_FILES = 1024
"""Open files that a coordinator with some hundred participants needs, one connection each."""
_LEAST_DISK_BYTES = 2 << 30
"""Free disk space for logs and for a saved state of a small model."""
SHM = Path("/dev/shm")  # noqa: S108 - shared memory of every Linux
CPUINFO = Path("/proc/cpuinfo")
GPU_NODE = Path("/dev/nvidia0")
"""Device file of the first GPU, whether or not torch can use it."""
RDMA = Path("/sys/class/infiniband")
"""Directory of network cards with RDMA; missing if there is none."""


class State(StrEnum):
    """Whether the subject of a finding can be used."""

    OK = "ok"
    ABSENT = "not here"
    """Optional, and not installed, without its device, or too small for some engines."""
    BROKEN = "broken"
    """Present, but does not work, or too small for any run."""


_STYLES = {State.OK: "green", State.ABSENT: "dim", State.BROKEN: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of ``weightlane doctor``."""

    kind: str
    """``machine``, ``library``, ``extra``, or the kind of an engine."""
    name: str
    found: str
    """Its version, size or number, as text."""
    state: State = State.OK
    trouble: str = ""
    """Effect on runs; empty if the state is ok."""
    way_out: str = ""


Probe = Callable[[], Iterable[Finding]]


def diagnose() -> list[Finding]:
    """Run every probe. One that raises, exits or hangs is a row of its own."""
    return [row for (kind, name), probe in _PROBES.items() for row in _rows(kind, name, probe)]


def _rows(kind: str, name: str, probe: Probe) -> list[Finding]:
    try:
        return within(_PROBE_S, lambda: list(probe()))
    except Exception as error:  # noqa: BLE001 - of a library, which may raise anything
        why = f"{type(error).__name__}: {error}"
        way_out = "" if kind == "machine" else "Install that library again, or weightlane in a fresh environment."
        return [Finding(kind, name, "", State.BROKEN, why, way_out)]


def all_work(findings: Sequence[Finding], asked: Sequence[str]) -> bool:
    """Whether nothing is broken, and each of the `asked` can be used: commands, extras, engines, or other rows.

    Raises `ConfigError` for a name that is none of these.
    """
    states: dict[str, list[State]] = {}
    for row in findings:
        states.setdefault(row.name, []).append(row.state)
    for name in asked:
        if unknown := [each for each in COMMANDS.get(name, (name,)) if each not in states]:
            raise ConfigError(
                f"there is nothing called {unknown[0]!r} to look at.",
                part="doctor",
                hint=f"Names: {', '.join([*COMMANDS, *states])}.",
            )
    needed = [state for name in asked for each in COMMANDS.get(name, (name,)) for state in states[each]]
    return not any(row.state is State.BROKEN for row in findings) and all(state is State.OK for state in needed)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return a table of all findings, with a section for each kind."""
    remedy = Column("what will not work, and the way out", overflow="fold")  # shows a long pip command in full
    table = Table("", "found", "", remedy)
    kind = ""
    for row in findings:
        if row.kind != kind:
            table.add_section()
            table.add_row(Text(row.kind, "bold"))
            kind = row.kind
        told = " ".join(part for part in (row.trouble and f"{row.trouble.rstrip('.')}.", row.way_out) if part)
        table.add_row(Text(row.name), Text(row.found), Text(row.state, _STYLES[row.state]), Text(told))
    return table


def _machine(name: str, found: str, trouble: str = "", way_out: str = "", state: State = State.BROKEN) -> list[Finding]:
    """Return the row of a resource. It is ok unless there is `trouble`, which makes it `state`."""
    return [Finding("machine", name, found, state, trouble, way_out) if trouble else Finding("machine", name, found)]


def _python() -> list[Finding]:
    return _machine("python", f"{platform.python_version()}, weightlane {version('weightlane')}")


def _cpu() -> list[Finding]:
    flags = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    paths = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}
    has = [path for path, flag in paths.items() if flag in flags]
    found = f"cores: {usable_cpus()}, {platform.machine()}, {', '.join(has) or 'no AVX2'}"
    too_old = not has and platform.machine() == "x86_64"
    return _machine("cpu", found, "vLLM's CPU build needs AVX2" if too_old else "", "Use a newer CPU or a GPU.")


def _gpus() -> list[Finding]:
    import torch  # noqa: PLC0415 - may be broken

    from weightlane.ckpt_engines.runtime.devices import device_count  # noqa: PLC0415 - imports torch

    if count := device_count("cuda"):
        cards = [torch.cuda.get_device_properties(number) for number in range(count)]
        return _machine("gpu", ", ".join(f"{card.name} of {card.total_memory / _GB:.0f} GB" for card in cards))
    if not GPU_NODE.exists():
        return _machine("gpu", "none", "Everything runs on the CPU", state=State.ABSENT)
    trouble = f"torch {torch.__version__} does not see the GPU of this machine"
    way_out = "Install torch for CUDA, and look at nvidia-smi and CUDA_VISIBLE_DEVICES."
    return _machine("gpu", "none that torch sees", trouble, way_out)


def _shared_memory() -> list[Finding]:
    usage = shutil.disk_usage(SHM)
    found = f"{usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free in {SHM}"
    trouble = f"vLLM's ranks and Ray need at least {_LEAST_SHM_BYTES >> 20} MiB there"
    way_out = f"Remove files of programs that have ended, or: docker run --shm-size=8g, mount -o remount,size=8g {SHM}."
    return _machine("shared memory", found, trouble if usage.free < _LEAST_SHM_BYTES else "", way_out)


def _open_files() -> list[Finding]:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    few = isinstance(soft, int) and soft < _LEAST_FILES
    trouble = "a coordinator runs out of connections, and Ray refuses to start" if few else ""
    return _machine("open files", f"{soft}, at most {hard}", trouble, f"Set ulimit -n {4 * _LEAST_FILES}.")


def _locked_memory() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _machine("locked memory", "unlimited")
    trouble = "network cards with RDMA cannot register memory (nccl, nixl, mooncake)" if RDMA.exists() else ""
    way_out = "Set ulimit -l unlimited, LimitMEMLOCK=infinity, or docker run --ulimit memlock=-1."
    return _machine("locked memory", f"{soft >> 20} MiB", trouble, way_out, State.ABSENT)


def _disk() -> list[Finding]:
    usage = shutil.disk_usage(".")
    found = f"{usage.free / _GB:.1f} of {usage.total / _GB:.1f} GB free in {Path.cwd()}"
    trouble = "a run cannot save its state here" if usage.free < _LEAST_DISK_BYTES else ""
    return _machine("disk", found, trouble, "Set run.dir to a directory on another disk.")


def _torch() -> Iterator[Finding]:
    import torch  # noqa: PLC0415 - may be broken

    yield Finding("library", "torch", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()} on the CPU")


def _extras() -> Iterator[Finding]:
    for extra in ("", *extras_of_users()):
        libraries = [library_of(name) for name in dict.fromkeys(members(extra))]
        own = libraries[: len(listed_by(extra))]
        found = ", ".join(_installed(library) for library in own if library.version)
        users = [command for command, extras in COMMANDS.items() if extra in extras]
        kind, name = ("extra", extra) if extra else ("library", "weightlane")
        way_out = how_to_install_extra(extra)
        if misfits := [library.misfit for library in libraries if library.misfit]:
            yield Finding(kind, name, found, State.BROKEN, "; ".join(misfits), way_out)
        elif absent := [library.distribution for library in libraries if not library.version]:
            trouble = f"{', '.join(absent)} not installed" + (f", for weightlane {', '.join(users)}" if users else "")
            yield Finding(kind, name, found, State.ABSENT if extra else State.BROKEN, trouble, way_out)
        else:
            yield Finding(kind, name, found)


def _installed(library: Library) -> str:
    untried = " (newer than what was tried: checked when it is used)" if library.untried else ""
    return f"{library.distribution} {library.version}{untried}"


def _engines() -> Iterator[Finding]:
    from .listing import listings  # noqa: PLC0415 - imports torch

    for kind, rows in listings().items():
        usable = [row["name"] for row in rows if row["unavailable"] is None]
        for row in rows:
            why = row["unavailable"]
            if why is None:
                yield Finding(f"{kind} engine", row["name"], row["distribution"])
                continue
            absent = row.get("capabilities") is not None or "not installed" in why or "ModuleNotFoundError" in why
            way_out = f"Use {' or '.join(usable)}." if usable else ""
            state = State.ABSENT if absent else State.BROKEN
            yield Finding(f"{kind} engine", row["name"], row["distribution"], state, why, way_out)


def _vllm_platform() -> Iterator[Finding]:
    if not library_of("vllm").version:
        return
    from weightlane.rollout.config import RolloutConfig  # noqa: PLC0415 - imports torch
    from weightlane.rollout.vllm.environment import prepare_environment  # noqa: PLC0415 - imports vLLM

    on_cpu = prepare_environment(RolloutConfig())
    yield Finding("rollout engine", "vllm's platform", "cpu" if on_cpu else "an accelerator")


_PROBES: dict[tuple[str, str], Probe] = {
    ("machine", "python"): _python,
    ("machine", "cpu"): _cpu,
    ("machine", "gpu"): _gpus,
    ("machine", "shared memory"): _shared_memory,
    ("machine", "open files"): _open_files,
    ("machine", "locked memory"): _locked_memory,
    ("machine", "disk"): _disk,
    ("library", "torch"): _torch,
    ("library", "extras"): _extras,
    ("engine", "engines"): _engines,
    ("rollout engine", "vllm's platform"): _vllm_platform,
}
