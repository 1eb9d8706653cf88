"""Environment variables for the making of one object, by libraries that take some settings from nowhere else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_lock = threading.Lock()


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, of which there is one at a time. Public in `toolkit`."""
    with _lock:
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
