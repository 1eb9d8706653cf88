"""The shared-memory engine: no copy on the sender's side, nothing with a name, and same-host only."""

from __future__ import annotations

import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    PeerLostError,
    ProtocolError,
    StorageError,
    Topology,
    TransportError,
    WeightReceiver,
    WeightSender,
    error_from_wire,
)
from weightlane.ckpt_engines._memfd import MappedFile, Segment
from weightlane.ckpt_engines._memory import available_memory_bytes
from weightlane.ckpt_engines.conformance.base import ConformanceBase, ConnectionMaker
from weightlane.ckpt_engines.conformance.payload import Parcel
from weightlane.ckpt_engines.conformance.pool import RemoteHalf
from weightlane.ckpt_engines.json_line import Line

SECONDS = 5.0
MIB = 1 << 20
CPU = torch.device("cpu")


class NoMailbox:
    """The engine needs none."""

    def put(self, key: str, value: Any) -> None:
        raise AssertionError(key)

    def get(self, key: str, deadline: Deadline) -> Any:
        raise AssertionError(key)


@pytest.fixture
def engine(socket_dir: Path) -> CheckpointEngine:
    return CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})


@pytest.fixture
def pair(engine: CheckpointEngine, socket_dir: Path) -> Iterator[tuple[WeightSender, WeightReceiver]]:
    """A connected sender and receiver in this process."""
    sender, receiver = engine.make_sender("s"), engine.make_receiver("r")
    topology = Topology("session", {"s": sender.address()}, {"r": receiver.address()})
    (path,) = socket_dir.iterdir()
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    thread = threading.Thread(target=sender.connect, args=(topology, NoMailbox(), Deadline.after(SECONDS)))
    thread.start()
    receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    thread.join(SECONDS)
    assert list(socket_dir.iterdir()) == []  # the name is gone as soon as everybody is in
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
    gc.collect()  # engines of other tests
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weightlane" in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            found.append(end - start)
    return found


def test_allocated_memory_is_sent_without_a_copy_wherever_the_bucket_lies_in_it(
    engine: CheckpointEngine, pair: tuple[WeightSender, WeightReceiver]
) -> None:
    buffer = engine.allocate(1 << 20, CPU)
    buffer.copy_(torch.randint(0, 256, (1 << 20,), dtype=torch.uint8))
    for version, (start, stop) in enumerate([(0, 1 << 20), (4097, 70_000), ((1 << 20) - 1, 1 << 20)]):
        assert torch.equal(deliver(pair, Bucket(version, 0, buffer[start:stop])), buffer[start:stop])
    assert mapped_segments() == [1 << 20] * 2  # the sender's and the receiver's view of one segment: no scratch


def test_memory_for_copies_grows_by_replacement_on_both_sides(pair: tuple[WeightSender, WeightReceiver]) -> None:
    for version, nbytes in enumerate([10_000, 100_000, 1_000_000, 50]):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        assert torch.equal(deliver(pair, Bucket(version, 0, data)), data)
    assert mapped_segments() == [1 << 20] * 2


def test_freeing_gives_the_memory_back_once_the_last_tensor_is_gone(
    engine: CheckpointEngine, pair: tuple[WeightSender, WeightReceiver]
) -> None:
    buffer = engine.allocate(1 << 20, CPU)
    deliver(pair, Bucket(1, 0, buffer))
    pair[0].close()
    pair[1].close()
    assert mapped_segments() == [1 << 20]  # it outlives its senders
    engine.free(buffer[5:5])
    engine.free(buffer)  # a second time: nothing
    engine.free(torch.ones(3))  # nor for what is not its own
    buffer.fill_(1)  # still mapped: a late reader is wrong, but does not crash
    del buffer
    assert mapped_segments() == []


def test_a_peer_on_another_host_is_refused_with_an_engine_that_would_do(socket_dir: Path) -> None:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})
    receiver = engine.make_receiver("r")
    topology = Topology(
        "session", {"s": {"socket": "weightlane-0123456789abcdef.sock", "host": "other"}}, {"r": receiver.address()}
    )
    with pytest.raises(TransportError, match="gloo"):
        receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    receiver.close()


@pytest.mark.parametrize("name", ["../weightlane-0123456789abcdef.sock", "/run/some.sock", "", None, 7])
def test_a_socket_name_that_could_be_another_path_is_refused(socket_dir: Path, name: object) -> None:
    receiver = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)}).make_receiver("r")
    topology = Topology("session", {"s": {**receiver.address(), "socket": name}}, {"r": receiver.address()})
    with pytest.raises(ProtocolError, match="name of a socket"):
        receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    receiver.close()


def test_a_socket_path_that_is_too_long_or_missing_is_a_config_error(socket_dir: Path) -> None:
    registry = CheckpointEngineRegistry()
    with pytest.raises(ConfigError, match=r"socket_dir.*at most"):
        registry.create("shm", {"socket_dir": "/tmp/" + "x" * 90})
    sender = registry.create("shm", {"socket_dir": str(socket_dir / "missing")}).make_sender("s")
    with pytest.raises(ConfigError, match="missing"):
        sender.address()
    sender.close()


def test_only_sockets_of_dead_senders_are_cleared_away(socket_dir: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(socket_dir / "weightlane-dead.sock"))
    dead.close()
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})
    alive, second = engine.make_sender("alive"), engine.make_sender("second")
    names = {alive.address()["socket"], second.address()["socket"]}
    assert {path.name for path in socket_dir.iterdir()} == names
    alive.close()
    second.close()
    assert list(socket_dir.iterdir()) == []


def test_a_descriptor_that_is_no_segment_of_the_announced_size_is_refused(tmp_path: Path) -> None:
    segment = Segment(4096)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(4096)
    for path, nbytes in ((f"/proc/self/fd/{segment.descriptor}", 8192), (str(tmp_path / "file"), 4096)):
        with Path(path).open("r+b") as opened, pytest.raises(ProtocolError, match="cannot map"):
            MappedFile(os.dup(opened.fileno()), nbytes)
    segment.retire()


def inodes_of_segments(process_directory: Path) -> set[str]:
    """Inodes of the memory files that a process maps; empty when it is gone."""
    try:
        lines = (process_directory / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:weightlane" in line}


class TestKilled(ConformanceBase):
    @pytest.fixture
    def engine_name(self) -> str:
        return "shm"

    def test_after_killing_everybody_no_process_holds_the_shared_memory(self, connected: ConnectionMaker) -> None:
        connection = connected(2)
        connection.deliver([Parcel(1, 0, 1 << 20, 1)])
        held = [inodes_of_segments(Path(f"/proc/{half.pid}")) for half in connection.halves]
        assert held[0]
        assert held[0] == held[1] == held[2]
        for half in connection.halves:
            half.kill()
        holders = [path for path in Path("/proc").glob("[0-9]*") if inodes_of_segments(path) & held[0]]
        assert holders == []


def connected_pair(engine: CheckpointEngine) -> tuple[WeightSender, WeightReceiver]:
    sender, receiver = engine.make_sender("s"), engine.make_receiver("r")
    topology = Topology("session", {"s": sender.address()}, {"r": receiver.address()})
    thread = threading.Thread(target=sender.connect, args=(topology, NoMailbox(), Deadline.after(SECONDS)))
    thread.start()
    receiver.connect(topology, NoMailbox(), Deadline.after(SECONDS))
    thread.join(SECONDS)
    return sender, receiver


def test_an_engine_holds_no_more_shared_memory_than_it_may(socket_dir: Path) -> None:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir), "max_shared_mib": 3})
    pair = connected_pair(engine)
    sender, receiver = pair
    buffer = engine.allocate(MIB, CPU)
    with pytest.raises(StorageError, match=r"2\.5 MiB .* max_shared_mib \(3 MiB\).* 1\.0 MiB are in use"):
        engine.allocate(2 * MIB + MIB // 2, CPU)
    with pytest.raises(StorageError, match="max_shared_mib"):  # a bucket from elsewhere needs a copy
        sender.send(Bucket(1, 0, torch.zeros(2 * MIB + 1, dtype=torch.uint8)), ["r"], Deadline.after(SECONDS))
    data = torch.randint(
        0, 256, (MIB + MIB // 3,), dtype=torch.uint8
    )  # for which 2 MiB would be taken if there were more
    for version, bucket in enumerate((data, buffer, data[:5], torch.ones(2 * MIB, dtype=torch.uint8))):
        assert torch.equal(deliver(pair, Bucket(version, 0, bucket)), bucket)
        assert sum(mapped_segments()) <= 2 * 3 * MIB  # both sides are in this process
    sender.close()
    receiver.close()


def test_memory_that_the_machine_does_not_have_is_refused_in_words_and_not_by_the_kernels_killer(
    socket_dir: Path,
) -> None:
    left = available_memory_bytes()
    assert left is not None
    assert left > 0
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir), "max_shared_mib": 1 << 30})
    with pytest.raises(StorageError, match="MiB are left"):
        engine.allocate(2 * left, CPU)


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "5", 4096), ("3000", "2500", 900), ("100", "900", 0), ("9999", "1", 4096)]
)
def test_the_memory_that_is_left_is_the_containers_if_that_has_less_than_the_machine(
    tmp_path: Path, limit: str, used: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 400\n" if used == "2500" else "anon 1\n")
    assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None


class TestKilledInEachPhase(ConformanceBase):
    """A killed process leaves nothing that the next start would not clear away."""

    @pytest.fixture
    def engine_name(self) -> str:
        return "shm"

    @pytest.fixture
    def engine_options(self, socket_dir: Path) -> dict[str, Any]:
        return {"socket_dir": str(socket_dir)}

    @pytest.mark.parametrize("doomed_side", ["sender", "receiver"])
    @pytest.mark.parametrize("phase", ["addressed", "connecting", "connected", "between buckets", "in mid-bucket"])
    def test_killed(
        self, halves: ConnectionMaker, engine_options: dict[str, Any], phase: str, doomed_side: str
    ) -> None:
        sockets = Path(engine_options["socket_dir"])
        connection = halves(2)
        doomed = connection.sender if doomed_side == "sender" else connection.receivers[0]
        others = [half for half in connection.halves if half is not doomed]
        waiting: list[RemoteHalf] = []
        held: set[str] = set()
        if phase in ("addressed", "connecting"):
            connection.exchange_addresses()
            assert len(list(sockets.iterdir())) == 1
            if phase == "connecting":
                waiting = [connection.sender, connection.receivers[0]]  # the third stays away, so that it stays at that
            for half in waiting:
                connection.start_connect(half, deadline_s=3)
            time.sleep(0.2)
        else:
            connection.connect()
        if phase in ("between buckets", "in mid-bucket"):
            connection.deliver([Parcel(1, 0, MIB, 1)])
            held = inodes_of_segments(Path(f"/proc/{connection.sender.pid}"))
            assert held
            for half in connection.halves:  # memory has no names
                assert "/dev/shm" not in Path(f"/proc/{half.pid}/maps").read_text()
        if phase == "in mid-bucket":  # nobody receives, so the sender waits
            connection.start_send([Parcel(1, 1, MIB, 2)], deadline_s=3)
            waiting = [connection.sender]
            time.sleep(0.1)
        doomed.kill()
        for half in others:
            if half in waiting:
                with pytest.raises(PeerLostError):
                    half.result()
            half.call("close")
        left = [path for path in Path("/proc").glob("[0-9]*") if inodes_of_segments(path) & held]
        assert left == []
        following = CheckpointEngineRegistry().create("shm", engine_options).make_sender("next")
        name = following.address()["socket"]
        assert [path.name for path in sockets.iterdir()] == [name]
        following.close()
        assert list(sockets.iterdir()) == []


def test_a_socket_whose_owner_was_killed_before_it_listened_is_cleared_away_but_one_in_the_making_is_not(
    socket_dir: Path, children: Any
) -> None:
    program = (
        "import fcntl, os, socket, sys\n"
        "directory = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(directory, fcntl.LOCK_SH)\n"
        "socket.socket(socket.AF_UNIX).bind(sys.argv[1] + '/weightlane-0123456789abcdef.sock')\n"
        "print('bound', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = children.start(["-c", program, str(socket_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == "bound\n"
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir)})
    for killed in (False, True):
        if killed:
            child.kill()
            child.wait(5)
        sender = engine.make_sender("s")
        started = time.monotonic()
        sender.address()
        assert time.monotonic() - started < 3
        assert len(list(socket_dir.iterdir())) == (1 if killed else 2)
        sender.close()


class Contained:
    """A half in a container of its own."""

    def __init__(self, process: subprocess.Popen[str], line: Line) -> None:
        self.process = process
        self.line = line

    def start(self, op: str, **arguments: Any) -> None:
        self.line.send({"op": op, **arguments})

    def answer(self) -> Any:
        answer = self.line.receive(60) or {"ok": "it died"}
        if "error" in answer:
            raise error_from_wire(answer["error"])
        return answer["ok"]

    def call(self, op: str, **arguments: Any) -> Any:
        self.start(op, **arguments)
        return self.answer()

    def namespaces(self) -> set[str]:
        return {str(Path(f"/proc/{self.process.pid}/ns/{kind}").readlink()) for kind in ("user", "mnt", "net", "ipc")}


NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc"]
NAMESPACES += ["--fork", "--kill-child", "--mount-proc"]


def no_namespaces() -> str:
    """Why this machine lets us make no namespaces; empty when it does."""
    try:
        probe = subprocess.run(
            [*NAMESPACES, "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False, capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    return probe.stderr.strip()


def test_sender_and_receivers_in_containers_of_their_own_need_to_share_nothing_but_the_sockets_directory(
    socket_dir: Path, children: Any
) -> None:
    if reason := no_namespaces():
        pytest.skip(f"this machine lets nobody make namespaces: {reason}")
    (socket_dir / "shared").mkdir()
    options = {"socket_dir": str(socket_dir / "shared")}
    program = ["-P", "-m", "weightlane.ckpt_engines.conformance.half_process"]
    # Own processes, network, System V IPC and /dev/shm. The directory is reached under another path in the second one.
    inside = 'mount -t tmpfs none /dev/shm && mount -t tmpfs none /run && exec "$@"'
    moved = f'mkdir -p /run/elsewhere && mount --bind {options["socket_dir"]} /run/elsewhere && exec "$@"'
    scripts = [inside, f"mount -t tmpfs none /dev/shm && mount -t tmpfs none /run && {moved}"]
    halves = []
    for script in scripts:
        command = [*NAMESPACES, "sh", "-c", script, "sh", sys.executable, *program]
        launch = f"import os; os.execvp({command[0]!r}, {command!r})"
        ours, theirs = socket.socketpair()
        with theirs:
            halves.append(Contained(children.start(["-c", launch], stdin=theirs), Line(ours)))
    sender, receiver = halves
    for half in halves:
        assert half.call("unpickled") == 0  # it is there
    assert len(sender.namespaces() | receiver.namespaces()) == 8
    sender.call("make", side="sender", engine="shm", options=options, name="s")
    receiver.call("make", side="receiver", engine="shm", options={"socket_dir": "/run/elsewhere"}, name="r")
    topology = {
        "session": "session",
        "key": "",
        "senders": {"s": sender.call("address")},
        "receivers": {"r": receiver.call("address")},
    }
    for half in (sender, receiver):
        half.start("connect", topology=topology, mailbox=str(socket_dir), deadline_s=SECONDS)
    for half in (sender, receiver):
        half.answer()
    parcels = [Parcel(1, 0, 3 * MIB, 1), Parcel(1, 1, 0, 2), Parcel(1, 2, 70_001, 3)]
    receiver.start("receive", parcels=parcels, sender="s", deadline_s=SECONDS)
    sender.call("send", parcels=parcels, receivers=["r"], deadline_s=SECONDS)
    assert receiver.answer() == [""] * 3
    receiver.start("receive", parcels=[Parcel(2, 0, 1, 1)], sender="s", deadline_s=SECONDS)
    sender.process.kill()  # with all that is in its container
    with pytest.raises(PeerLostError):
        receiver.answer()
    for half in halves:
        half.line.close()
