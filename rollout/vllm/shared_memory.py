"""Finds and removes the shared memory that vLLM's processes leave behind when they are killed.

vLLM unlinks its segments at shutdown, and Python's resource tracker unlinks the segments that it knows. A killed process does not
unlink the buffers between tensor-parallel ranks. A tracker that is killed with its parent (Ray ends whole trees) unlinks nothing.
A segment without a name disappears with the last process that maps it, so that unlinking is safe once all have opened it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from weightlane.ckpt_engines.runtime.process_tree import children_by_parent

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory, not a place for temporary files
_PREFIXES = ("vllm_", "psm_", "sem.mp-")
"""vLLM's own segments, and those and the semaphores of Python's ``multiprocessing`` that it uses."""


def mapped_segments(pid: int | str = "self") -> set[Path]:
    """The named segments of vLLM that process `pid` has mapped; empty without ``/proc`` or without such a process.

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
