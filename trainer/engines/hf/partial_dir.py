"""Directories that appear complete or not at all: written under a temporary name next to their own, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weightlane.ckpt_engines import StorageError, WeightlaneError

from ..rank_collectives import on_rank_zero

PART = "trainer checkpoint"


def partial_name(directory: Path) -> Path:
    """Return the path under which the contents of `directory` are written until they are complete."""
    return directory.with_name(f".{directory.name}.partial")


def make_partial(directory: Path) -> Path:
    """Make an empty directory `partial_name`, deleting an older one. Raises `StorageError` if `directory` exists."""
    if directory.exists():
        raise StorageError(f"{directory} already exists.", part=PART, hint="Remove it or choose another name.")
    partial = partial_name(directory)
    discard_partial(directory)
    partial.mkdir(parents=True)
    return partial


def discard_partial(directory: Path) -> None:
    """Remove the incomplete contents of `directory`, if there are any. Never raises."""
    shutil.rmtree(partial_name(directory), ignore_errors=True)


def storage_error(verb: str, directory: Path, detail: object) -> StorageError:
    """Return a `StorageError` which says that `directory` could not be `verb` ("read", "written")."""
    return StorageError(f"{directory} could not be {verb}: {detail}.", part=PART, hint="Check space and permissions.")


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raise an `OSError` inside the block as the `StorageError` of `directory`."""
    try:
        yield
    except OSError as cause:
        if isinstance(cause, WeightlaneError):
            raise
        raise storage_error("written", directory, cause) from cause


def write_on_rank_zero(action: Callable[[], object], directory: Path, rank: int, device: torch.device) -> None:
    """Run `action`, which writes `directory`, on rank 0; every rank raises its error, `OSError` as `StorageError`. Collective."""

    def guarded() -> None:
        with writing(directory):
            action()

    on_rank_zero(guarded, rank, device, PART)
