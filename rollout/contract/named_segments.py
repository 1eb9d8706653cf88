"""The named shared memory that processes of vLLM, SGLang and Python's ``multiprocessing`` have mapped, and its removal.

A segment without a name disappears with the last process that maps it, so that unlinking is safe once all have opened it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from weightlane.ckpt_engines.runtime.process_tree import children_by_parent

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory, not a place for temporary files
_PREFIXES = ("vllm_", "sglang_loads_", "sgl_shm_", "psm_", "sem.mp-")
"""Names that vLLM and SGLang choose, and those of the segments and semaphores of Python's ``multiprocessing``."""


def mapped_segments(pid: int | str = "self") -> set[Path]:
    """The named segments that process `pid` has mapped; empty without ``/proc`` or without such a process.

    Segments are matched by inode: glibc creates a semaphore under a temporary name, which is the one in ``/proc``.
    """
    mapped: set[int] = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(f"{_FOLDER}/"):
                mapped.add(int(inode))
    found: set[Path] = set()
    for segment in _FOLDER.iterdir() if mapped else ():
        with suppress(OSError):
            if segment.name.startswith(_PREFIXES) and segment.stat().st_ino in mapped:
                found.add(segment)
    return found


def segments_of_trees(roots: Iterable[int]) -> set[Path]:
    """The `mapped_segments` of the processes `roots` and all their descendants."""
    found: set[Path] = set()
    children = children_by_parent()
    pending = list(roots)
    while pending:
        pid = pending.pop()
        found |= mapped_segments(pid)
        pending += children[pid]
    return found


def unlink(segments: Iterable[Path]) -> None:
    """Remove the segments' names, if they still exist."""
    for segment in segments:
        with suppress(OSError):
            segment.unlink()
