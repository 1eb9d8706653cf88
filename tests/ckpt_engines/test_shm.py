"""The shared-memory engine: no copy on the sender's side, nothing with a name, and same-host only."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    ProtocolError,
    Topology,
    TransportError,
    WeightReceiver,
    WeightSender,
)
from weightlane.ckpt_engines._memfd import Segment

SECONDS = 5.0


class NoMailbox:
    """The engine needs none."""

    def put(self, key: str, value: Any) -> None:
        raise AssertionError(key)

    def get(self, key: str, deadline: Deadline) -> Any:
        raise AssertionError(key)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[WeightSender, WeightReceiver]]:
    """A connected sender and receiver in this process."""
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(tmp_path)})
    sender, receiver = engine.make_sender("s"), engine.make_receiver("r")
    topology = Topology("session", {"s": sender.address()}, {"r": receiver.address()})
    (path,) = tmp_path.iterdir()
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    thread = threading.Thread(target=sender.connect, args=(topology, NoMailbox(), Deadline.after(SECONDS)))
    thread.start()
    receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    thread.join(SECONDS)
    assert list(tmp_path.iterdir()) == []  # the name is gone as soon as everybody is in
    yield sender, receiver
    sender.close()
    receiver.close()


def deliver(pair: tuple[WeightSender, WeightReceiver], bucket: Bucket) -> torch.Tensor:
    sender, receiver = pair
    received = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    thread = threading.Thread(target=sender.send, args=(bucket, ["r"], Deadline.after(SECONDS)))
    thread.start()
    receiver.receive(Bucket(bucket.version, bucket.index, received), "s", Deadline.after(SECONDS))
    thread.join(SECONDS)
    assert not thread.is_alive()
    return received


def mapped_segments() -> list[int]:
    """Sizes of the mappings of memory files in this process, in bytes."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weightlane" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append(end - start)
    return found


def test_allocated_memory_is_sent_without_a_copy_wherever_the_bucket_lies_in_it(
    pair: tuple[WeightSender, WeightReceiver],
) -> None:
    buffer = pair[0].allocate(1 << 20)
    buffer.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    for version, (start, stop) in enumerate([(0, 1 << 20), (4097, 70_000), ((1 << 20) - 1, 1 << 20)]):
        assert torch.equal(deliver(pair, Bucket(version, 0, buffer[start:stop])), buffer[start:stop])
    assert mapped_segments() == [1 << 20] * 2  # the sender's and the receiver's view of one segment: no scratch


def test_memory_for_copies_grows_by_replacement_on_both_sides(pair: tuple[WeightSender, WeightReceiver]) -> None:
    for version, nbytes in enumerate([10_000, 100_000, 1_000_000, 50]):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        assert torch.equal(deliver(pair, Bucket(version, 0, data)), data)
    assert mapped_segments() == [1 << 20] * 2


def test_closing_gives_the_memory_back_once_the_last_tensor_is_gone(pair: tuple[WeightSender, WeightReceiver]) -> None:
    buffer = pair[0].allocate(1 << 20)
    deliver(pair, Bucket(1, 0, buffer))
    pair[0].close()
    pair[1].close()
    buffer.fill_(1)  # still mapped: a late reader is wrong, but does not crash
    del buffer
    assert mapped_segments() == []


def test_a_peer_on_another_host_is_refused_with_an_engine_that_would_do(tmp_path: Path) -> None:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(tmp_path)})
    receiver = engine.make_receiver("r")
    topology = Topology(
        "session", {"s": {"socket": "weightlane-0123456789abcdef.sock", "host": "other"}}, {"r": receiver.address()}
    )
    with pytest.raises(TransportError, match="gloo"):
        receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    receiver.close()


@pytest.mark.parametrize("name", ["../weightlane-0123456789abcdef.sock", "/run/some.sock", "", None, 7])
def test_a_socket_name_that_could_be_another_path_is_refused(tmp_path: Path, name: object) -> None:
    receiver = CheckpointEngineRegistry().create("shm", {"socket_dir": str(tmp_path)}).make_receiver("r")
    topology = Topology("session", {"s": {**receiver.address(), "socket": name}}, {"r": receiver.address()})
    with pytest.raises(ProtocolError, match="name of a socket"):
        receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    receiver.close()


def test_a_socket_path_that_is_too_long_or_missing_is_a_config_error(tmp_path: Path) -> None:
    registry = CheckpointEngineRegistry()
    with pytest.raises(ConfigError, match=r"socket_dir.*at most"):
        registry.create("shm", {"socket_dir": "/tmp/" + "x" * 90})
    sender = registry.create("shm", {"socket_dir": str(tmp_path / "missing")}).make_sender("s")
    with pytest.raises(ConfigError, match="missing"):
        sender.address()
    sender.close()


def test_only_sockets_of_dead_senders_are_cleared_away(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "weightlane-dead.sock"))
    dead.close()
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(tmp_path)})
    alive, second = engine.make_sender("alive"), engine.make_sender("second")
    names = {alive.address()["socket"], second.address()["socket"]}
    assert {path.name for path in tmp_path.iterdir()} == names
    alive.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_that_is_no_segment_of_the_announced_size_is_refused(tmp_path: Path) -> None:
    segment = Segment.create(4096)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(4096)
    for path, nbytes in ((f"/proc/self/fd/{segment.descriptor}", 8192), (str(tmp_path / "file"), 4096)):
        with Path(path).open("r+b") as opened, pytest.raises(ProtocolError, match="cannot map"):
            Segment.adopt(os.dup(opened.fileno()), nbytes)
    segment.close()


def inodes_of_segments(process_directory: Path) -> set[str]:
    """Inodes of the memory files that a process maps; empty when it is gone."""
    try:
        lines = (process_directory / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:weightlane" in line}


@pytest.mark.parametrize("engine_name", ["shm"])
def test_after_killing_everybody_no_process_holds_the_shared_memory(connected: Callable[[int], Any]) -> None:
    connection = connected(2)
    connection.deliver([[1, 0, 1 << 20, 1]])
    held = [inodes_of_segments(Path(f"/proc/{half.process.pid}")) for half in connection.halves]
    assert held[0]
    assert held[0] == held[1] == held[2]
    for half in connection.halves:
        half.signal(signal.SIGKILL)
    holders = [path for path in Path("/proc").glob("[0-9]*") if inodes_of_segments(path) & held[0]]
    assert holders == []
