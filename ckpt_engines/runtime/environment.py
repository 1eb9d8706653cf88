"""Environment variables that are set while one object is made, for libraries that take some settings from nowhere else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from ..errors import DeadlineExceededError

_lock = threading.Lock()
_LONGEST_S = 60.0
"""Longest wait, in seconds, for another thread's block to end. A constructor takes milliseconds unless it hangs."""


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block. Public in `toolkit`.

    Only one thread at a time can be in such a block. Raises `DeadlineExceededError` when another thread is in one for a minute.
    """
    if not _lock.acquire(timeout=_LONGEST_S):
        raise DeadlineExceededError(
            f"another thread has been making an object with environment variables of its own for {_LONGEST_S:.0f} s.",
            part="environment",
            hint="A constructor of torch.distributed or UCX hangs in this process: `py-spy dump` shows where.",
        )
    try:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    finally:
        _lock.release()
