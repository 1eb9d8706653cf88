"""Directories that appear complete or not at all: written under a temporary name next to their own, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from weightlane.ckpt_engines import StorageError, WeightlaneError

from ..rank_collectives import on_rank_zero

PART = "trainer checkpoint"


def partial_name(directory: Path) -> Path:
    """Return the path under which the contents of `directory` are written until they are complete."""
    return directory.with_name(f".{directory.name}.partial")


def make_partial(directory: Path) -> None:
    """Make an empty directory `partial_name`, deleting an older one. Raises `StorageError` if `directory` exists."""
    if directory.exists():
        raise StorageError(f"{directory} already exists.", part=PART, hint="Remove it or choose another name.")
    discard_partial(directory)
    partial_name(directory).mkdir(parents=True)


def discard_partial(directory: Path) -> None:
    """Remove the incomplete contents of `directory`, if there are any. Never raises."""
    shutil.rmtree(partial_name(directory), ignore_errors=True)


def storage_error(verb: str, directory: Path, detail: object) -> StorageError:
    """Return a `StorageError` which says that `directory` could not be `verb` ("read", "written")."""
    return StorageError(f"{directory} could not be {verb}: {detail}.", part=PART, hint="Check space and permissions.")


@contextmanager
def storage_errors(verb: str, path: Path) -> Iterator[None]:
    """Raise what an operating system or safetensors raises inside the block as `storage_error`."""
    from safetensors import SafetensorError  # noqa: PLC0415 - optional

    try:
        yield
    except (SafetensorError, OSError) as cause:  # safetensors has errors of its own, also for a full disk
        if isinstance(cause, WeightlaneError):
            raise
        raise storage_error(verb, path, cause) from cause


def write_together(
    directory: Path, write: Callable[[Path], None], finish: Callable[[Path], None], rank: int, device: torch.device
) -> None:
    """Write a directory under its temporary name, then rename it. Collective.

    Every rank calls `write`, which is collective, with the temporary directory; then rank 0 calls `finish`. All raise the error
    of either, an `OSError` as `StorageError`. The directory is then absent, and otherwise complete, also after a failure of a
    machine if each rank has called `to_disk` for what it wrote.
    """
    partial = partial_name(directory)

    def last() -> None:
        finish(partial)
        for path in (*partial.iterdir(), partial):
            to_disk(path)
        partial.rename(directory)
        with suppress(OSError):  # the directory is there, and complete
            to_disk(directory.parent)

    def guarded(action: Callable[[], object]) -> None:
        with storage_errors("written", directory):
            action()

    on_rank_zero(lambda: guarded(lambda: make_partial(directory)), rank, device, PART)
    try:
        write(partial)
        on_rank_zero(lambda: guarded(last), rank, device, PART)
    except BaseException:
        if rank == 0:
            discard_partial(directory)
        raise


def to_disk(path: Path) -> None:
    """Wait until a file's contents, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
