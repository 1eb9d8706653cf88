"""Shared memory that a receiver maps."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
from pathlib import Path

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines.engines.shared_memory import memfd as _memfd
from weightlane.ckpt_engines.engines.shared_memory.memfd import MemfdMapping, MemfdSegment

pytestmark = pytest.mark.usefixtures("small_heap")
NBYTES = 8 << 20


def resident_bytes() -> list[int]:
    """Return the resident bytes of each read-only segment mapping in this process."""
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    ours = [each for each in mappings if "memfd:weightlane" in each and " r--s " in each.splitlines()[0]]
    return [1024 * int(re.search(r"^Rss: +(\d+)", each, re.MULTILINE)[1]) for each in ours]  # type: ignore[index]


def test_pages_are_there_once_a_segment_is_mapped_and_other_threads_get_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, mapping, went_on = _memfd._libc.madvise, threading.Event(), threading.Event()

    def other() -> None:
        assert mapping.wait(HANG_S)
        went_on.set()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    def madvise(address: int, nbytes: int, advice: int) -> int:
        mapping.set()
        assert went_on.wait(HANG_S), "the interpreter is held meanwhile"
        return int(real(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice))

    monkeypatch.setattr(_memfd._libc, "madvise", madvise)
    threading.Thread(target=other, daemon=True).start()
    gc.collect()  # other tests may have left mappings
    segment = MemfdSegment(NBYTES)
    segment.data.fill_(7)
    mapped = MemfdMapping(os.dup(segment.descriptor), NBYTES)
    assert went_on.is_set()
    assert resident_bytes() == [NBYTES]
    assert bool(mapped.view(0, NBYTES).eq(7).all())
    mapped.close()
    segment.retire()
