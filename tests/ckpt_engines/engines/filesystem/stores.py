"""Places where versions are kept, senders and receivers of the filesystem engine there, and what they send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import torch
from sessions import soon

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    Deadline,
    StoringSender,
    Topology,
    VersionFiles,
    WeightReceiver,
)
from weightlane.ckpt_engines.runtime.devices import HOST


class Place:
    """Where versions are kept, on whatever file system, seen from outside."""

    def __init__(self, path: str, storage_options: dict[str, Any]) -> None:
        self.options = {"path": path, "storage_options": storage_options}
        self.fs, self.root = fsspec.url_to_fs(path, use_listings_cache=False, **storage_options)

    def files(self) -> list[str]:
        return sorted(str(path).removeprefix(f"{self.root}/") for path in self.fs.find(self.root))

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(f"{self.root}/{path}"))

    def latest(self) -> list[tuple[int, str]]:
        """Return the committed versions and their directories, newest first."""
        found = json.loads(self.read("latest.json"))
        assert (found["version"], found["directory"]) == tuple(found["committed"][0].values())
        return [(entry["version"], entry["directory"]) for entry in found["committed"]]


opened: list[StoringSender | WeightReceiver] = []
"""Halves of the running test, which are closed behind it. No link is around them, which would close one after its first error."""


def connect_sender(
    options: dict[str, Any], session: str = "session-1", deadline: Deadline | None = None
) -> tuple[StoringSender, Topology]:
    sender = CheckpointEngineRegistry().create("filesystem", options).make_sender("trainer", HOST)
    assert isinstance(sender, StoringSender)
    opened.append(sender)
    topology = Topology(session, {"trainer": sender.address()}, {})
    sender.connect(topology, {}, deadline or soon())
    return sender, topology


def connect(options: dict[str, Any], session: str = "session-1") -> tuple[StoringSender, WeightReceiver]:
    sender, topology = connect_sender(options, session)
    receiver = CheckpointEngineRegistry().create("filesystem", options).make_receiver("rollout", HOST)
    opened.append(receiver)
    receiver.connect(topology, {}, soon())
    return sender, receiver


def send_bucket(sender: StoringSender, bucket: Bucket) -> None:
    sender.post(bucket, ["rollout"])
    sender.flush(soon())


def receive(receiver: WeightReceiver, bucket: Bucket, deadline: Deadline | None = None) -> None:
    receiver.post(bucket, "trainer")
    receiver.flush(deadline or soon())


def content(version: int, index: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(version * 1000 + index)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def send(sender: StoringSender, version: int, index: int, nbytes: int) -> torch.Tensor:
    data = content(version, index, nbytes)
    send_bucket(sender, Bucket(version, index, data.clone()))
    return data


def received(receiver: WeightReceiver, version: int, index: int, nbytes: int) -> torch.Tensor:
    data = torch.full((nbytes,), 0x55, dtype=torch.uint8)
    receive(receiver, Bucket(version, index, data))
    return data


def prefix(nbytes: int) -> bytes:
    header = json.dumps({"x": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    return len(header).to_bytes(8, "little") + header


def publish(sender: StoringSender, version: int, *sizes: int, commit: bool = True) -> None:
    """A whole version as the framework sends it."""
    prefixes = [prefix(nbytes) for nbytes in sizes]
    sender.open_version(VersionFiles(version, prefixes, {"about.json": f"[{version}]"}), soon())
    for index, nbytes in enumerate(sizes):
        send(sender, version, index, nbytes)
    if commit:
        sender.commit_version(version, {"checksums.json": str(version)}, soon())


def version_files(directory: str, buckets: int) -> list[str]:
    """Paths of the files of a committed version."""
    names = [f"bucket-{index:05d}.safetensors" for index in range(buckets)]
    return sorted(f"{directory}/{name}" for name in [*names, "COMMITTED", "checksums.json", "about.json"])


def place_of(path: Path) -> Place:
    return Place(str(path), {})


def newest(path: Path) -> int:
    """The newest version that readers of a store find; -1 for none."""
    return place_of(path).latest()[0][0] if (path / "latest.json").exists() else -1
