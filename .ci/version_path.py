"""Counts the modules and classes that one version runs through, from `Publisher.publish` to its commit, over ``shm``.

    python .ci/version_path.py

One trainer rank, one replica of one rank, and the coordinator, in one process, as in the docstring of `weightlane.sync`. The
third version counts, since the first ones also connect. A module counts if one of its functions was called, and a class if one
of its methods was; the methods that `dataclass` writes do not count.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import defaultdict
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, WeightlaneError
from weightlane.sync import (
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    LocalShard,
    Publisher,
    Rendezvous,
    Subscriber,
    SyncConfig,
    TensorSpec,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sync", "ckpt_engines", "plugins")
COUNTED = 3
"""The version that counts."""
SETTLED_S = 0.3
"""Seconds in which threads end what follows a commit, such as releasing memory."""
WAIT_S = 30.0

called: set[tuple[str, str]] = set()
"""File and qualified name of each function that was called."""


def note(frame: FrameType, event: str, _: Any) -> None:
    """Note a call, as `sys.setprofile` requests."""
    if event == "call":
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))


class Replica:
    """A replica of one rank."""

    name = "rollout-0"

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def subscriber_names(self) -> list[str]:
        """See `weightlane.sync.Replica`."""
        return [self._subscriber.name]

    async def commit(self, version: int) -> CommitReport:
        """See `weightlane.sync.Replica`."""
        for tensor in self._subscriber.take(version).values():
            tensor.clone()
        self._subscriber.release(version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        """See `weightlane.sync.Replica`."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """See `weightlane.sync.Replica`."""
        raise error


def run() -> None:
    """Sync versions, and leave in `called` what the last one called."""
    spec = TensorSpec("w", (2, 3), torch.float32)
    rendezvous = Rendezvous.host()
    threading.setprofile(note)
    expected = Expectation({"w": ExpectedTensor(spec.shape, frozenset({spec.dtype}))})
    engine, shards = CheckpointEngineRegistry().create("shm"), [LocalShard.whole(spec, torch.zeros(spec.shape))]
    with (
        closing(Subscriber("rollout-0/0", rendezvous.address, "shm", {}, expected)) as subscriber,
        closing(Publisher("trainer-0", rendezvous.address, shards=shards, engine=engine)) as publisher,
        closing(Coordinator(rendezvous, [publisher.name], [Replica(subscriber)], SyncConfig())) as coordinator,
    ):
        sys.setprofile(note)
        for version in range(1, COUNTED + 1):
            time.sleep(SETTLED_S)
            called.clear()
            publisher.publish(version)
            publisher.fence()
            asyncio.run(coordinator.sync(version))
            publisher.wait(version, WAIT_S)
            subscriber.wait(version, WAIT_S)
        time.sleep(SETTLED_S)
        sys.setprofile(None)
        found = set(called)
    called.clear()
    called.update(found)


def classes_by_module() -> dict[str, set[str]]:
    """The classes that were called of each module of the product that was, by its path."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, name in called:
        path = Path(file)
        parts = path.resolve().relative_to(ROOT).parts if path.is_file() and path.resolve().is_relative_to(ROOT) else ()
        if parts and parts[0] in FOLDERS and "packages" not in parts:
            module = import_module(".".join(("weightlane", *Path(*parts).with_suffix("").parts)))
            owner = getattr(module, name.partition(".")[0], None)
            found[str(Path(*parts))] |= {owner.__name__} if isinstance(owner, type) else set()
    return found


if __name__ == "__main__":
    run()
    modules = classes_by_module()
    rows = [f"{module:56} {', '.join(sorted(classes))}" for module, classes in sorted(modules.items())]
    rows.append(f"{sum(map(len, modules.values()))} classes in {len(modules)} modules")
    sys.stdout.write("".join(f"{row}\n" for row in rows))
