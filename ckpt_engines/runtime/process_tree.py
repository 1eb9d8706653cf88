"""`children_by_parent`: which processes of this machine have started which."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def children_by_parent() -> defaultdict[int, list[int]]:
    """The process ids of the children of every process, empty without ``/proc``.

    Never raises. Processes may start and end meanwhile, and every child that does neither is listed. The kernel's own lists of
    children, ``/proc/*/task/*/children``, may omit such children when another child or the thread that started them ends.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    with suppress(OSError):
        for entry in os.listdir("/proc"):  # noqa: PTH208 - several hundred names, each a few times a second
            if entry.isdigit():
                with suppress(OSError):  # it has ended
                    stat = Path("/proc", entry, "stat").read_text(errors="replace")
                    children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    return children
