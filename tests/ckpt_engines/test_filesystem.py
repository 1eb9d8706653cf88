"""The filesystem engine: what lies in the directory, when it goes, and what a full disk does."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    ProtocolError,
    StorageError,
    Topology,
    WeightReceiver,
    WeightSender,
)

SECONDS = 5.0


class NoMailbox:
    """The engine needs none."""

    def put(self, key: str, value: Any) -> None:
        raise AssertionError(key)

    def get(self, key: str, deadline: Deadline) -> Any:
        raise AssertionError(key)


def connect(options: dict[str, Any], session: str = "session-1") -> tuple[WeightSender, WeightReceiver]:
    engine = CheckpointEngineRegistry().create("filesystem", options)
    sender, receiver = engine.make_sender("trainer"), engine.make_receiver("rollout")
    topology = Topology(session, {"trainer": sender.address()}, {"rollout": receiver.address()})
    sender.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    return sender, receiver


def send(sender: WeightSender, version: int, index: int, nbytes: int) -> torch.Tensor:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    sender.send(Bucket(version, index, data), ["rollout"], Deadline.after(SECONDS))
    return data


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (3, [2, 3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_versions_are_kept_and_older_ones_removed(tmp_path: Path, keep: int, kept: list[int]) -> None:
    sender, receiver = connect({"path": str(tmp_path), "keep_versions": keep})
    for version in (1, 2, 3, 4):
        send(sender, version, 0, 100)
        send(sender, version, 1, 10)
    versions = [f"session-1/sender-0/v{version}/bucket-{index}.bin" for version in kept for index in (0, 1)]
    assert files(tmp_path) == ["session-1/sender-0/sender.json", *versions]
    sender.close()
    receiver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_receiver_that_comes_too_late_for_a_version_is_told_so_before_its_deadline(tmp_path: Path) -> None:
    sender, receiver = connect({"path": str(tmp_path)})
    send(sender, 1, 0, 100)
    send(sender, 2, 0, 100)
    with pytest.raises(StorageError, match="keep_versions"):
        receiver.receive(Bucket(1, 0, torch.empty(100, dtype=torch.uint8)), "trainer", Deadline.after(SECONDS))
    sender.close()
    receiver.close()


@pytest.mark.parametrize("session", ["..", "a/b", "", "-x", "A", "a" * 101, "a.b", "ünï"])
def test_a_session_name_that_could_be_another_path_is_refused_by_both_halves(tmp_path: Path, session: str) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(tmp_path / "store")})
    topology = Topology(session, {"trainer": {}}, {"rollout": {}})
    for half in (engine.make_sender("trainer"), engine.make_receiver("rollout")):
        with pytest.raises(ProtocolError, match="session name"):
            half.connect(topology, NoMailbox(), Deadline.after(SECONDS))
        half.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fsync", [False, True])
def test_a_file_url_and_fsync_deliver_the_same_bytes(tmp_path: Path, fsync: bool) -> None:
    sender, receiver = connect({"path": f"file://{tmp_path}/x", "fsync": fsync})
    sent = send(sender, 1, 0, 12_345)
    received = torch.empty_like(sent)
    receiver.receive(Bucket(1, 0, received), "trainer", Deadline.after(SECONDS))
    assert torch.equal(sent, received)
    sender.close()
    receiver.close()


def test_a_remote_file_system_delivers_through_fsspec_and_is_left_empty() -> None:
    path = f"memory://{uuid.uuid4().hex}"
    sender, receiver = connect({"path": path})
    for version, nbytes in ((1, 100_001), (2, 0), (3, 7)):
        sent = send(sender, version, 0, nbytes)
        received = torch.zeros(nbytes, dtype=torch.uint8)
        receiver.receive(Bucket(version, 0, received), "trainer", Deadline.after(SECONDS))
        assert torch.equal(sent, received)
    sender.close()
    receiver.close()
    assert fsspec.filesystem("memory").find(path) == []


def test_an_unknown_protocol_is_a_config_error(tmp_path: Path) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": "nosuch://bucket/x"})
    with pytest.raises(ConfigError, match="nosuch"):
        engine.make_sender("trainer")


def test_a_directory_that_cannot_be_made_is_a_storage_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=str(tmp_path)):
        connect({"path": str(tmp_path / "file" / "store")})


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; where none can be mounted, a limit of 1 MiB on the size of a file."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    yield disk
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_a_storage_error_that_says_so_and_leaves_nothing_behind(tiny_disk: Path) -> None:
    sender, receiver = connect({"path": str(tiny_disk / "store")})
    sent = send(sender, 1, 0, 100_000)
    with pytest.raises(StorageError, match=r"(?i)no space left|file too large") as failure:
        send(sender, 1, 1, 4 << 20)
    assert str(tiny_disk) in str(failure.value)
    left = files(tiny_disk)
    assert left == ["store/session-1/sender-0/sender.json", "store/session-1/sender-0/v1/bucket-0.bin"]
    received = torch.empty_like(sent)  # what was complete before is still good
    receiver.receive(Bucket(1, 0, received), "trainer", Deadline.after(SECONDS))
    assert torch.equal(sent, received)
    sender.close()
    receiver.close()
    assert files(tiny_disk) == []


@pytest.mark.parametrize("engine_name", ["filesystem"])
def test_what_a_killed_sender_leaves_is_removed_by_the_next_and_what_lives_stays(
    connected: Callable[[int], Any], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = connected(1)
    first.deliver([[1, 0, 1000, 1]])
    first.sender.signal(signal.SIGKILL)
    assert len(files(store)) == 2
    foreign = store / "from-another-host" / "sender-0"
    foreign.mkdir(parents=True)
    described = json.loads((store / first.topology["session"] / "sender-0" / "sender.json").read_text())
    (foreign / "sender.json").write_text(json.dumps({**described, "host": "elsewhere"}))

    second = connected(1)
    third = connected(1)
    assert sorted(path.name for path in store.iterdir()) == sorted(
        ["from-another-host", second.topology["session"], third.topology["session"]]
    )
    second.deliver([[1, 0, 1000, 2]])
    third.deliver([[1, 0, 1000, 3]])
