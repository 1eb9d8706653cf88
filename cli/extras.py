"""Optional dependencies of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weightlane.ckpt_engines import ConfigError


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Say how to install what an import inside the block lacks."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed.", part=name, hint=f"Install it with: pip install 'weightlane[{name}]'."
        ) from error
