"""The shared-memory engine: no copy on the sender's side, nothing with a name, and same-host only."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import Session
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    ConfigError,
    PeerLostError,
    StorageError,
)
from weightlane.ckpt_engines.conformance.checks.base import ConformanceBase, ConnectionMaker
from weightlane.ckpt_engines.conformance.processes import half_process
from weightlane.ckpt_engines.conformance.processes.payload import Parcel
from weightlane.ckpt_engines.conformance.processes.pool import RemoteHalf
from weightlane.ckpt_engines.links import SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.ckpt_engines.runtime.fork_server import ForkedProcess, ForkServer
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.ckpt_engines.runtime.process_memory import available_memory_bytes

pytestmark = pytest.mark.usefixtures("small_heap")
MIB = 1 << 20
CPU = torch.device("cpu")
Sizes = Callable[[], list[int]]


def engine_in(socket_dir: Path, **options: Any) -> CheckpointEngine:
    return CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir), **options})


@pytest.fixture
def engine(socket_dir: Path) -> CheckpointEngine:
    return engine_in(socket_dir)


@pytest.fixture
def session(engine: CheckpointEngine) -> Iterator[Session]:
    made = Session(engine, "r")
    yield made
    made.close()


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.fixture
def sizes(mappings: Callable[[], list[tuple[str, int]]]) -> Sizes:
    """Tells the sizes of the mappings of memory files that the test has made."""
    return lambda: [nbytes for _, nbytes in mappings()]


def test_allocated_memory_is_sent_without_a_copy_wherever_the_bucket_lies_in_it(
    sizes: Sizes, engine: CheckpointEngine, session: Session
) -> None:
    buffer = engine.allocate(MIB, CPU)
    buffer.copy_(random_bytes(MIB))
    for version, (start, stop) in enumerate([(0, MIB), (4097, 70_000), (MIB - 1, MIB)]):
        assert torch.equal(session.deliver(version, buffer[start:stop]), buffer[start:stop])
    assert sizes() == [MIB] * 2  # the sender's and the receiver's view of one segment: no scratch


def test_memory_for_copies_grows_by_replacement_on_both_sides(sizes: Sizes, session: Session) -> None:
    for version, nbytes in enumerate([10_000, 100_000, 1_000_000, 50]):
        data = random_bytes(nbytes)
        assert torch.equal(session.deliver(version, data), data)
    assert sizes() == [MIB] * 2


def test_freeing_gives_the_memory_back_once_the_last_tensor_is_gone(
    sizes: Sizes, engine: CheckpointEngine, session: Session
) -> None:
    buffer = engine.allocate(MIB, CPU)
    session.deliver(1, buffer)
    session.close()
    assert sizes() == [MIB]  # it outlives its senders
    engine.free(buffer[5:5])
    engine.free(buffer)  # a second time: nothing
    engine.free(torch.ones(3))  # nor for what is not its own
    buffer.fill_(1)  # still mapped: a late reader is wrong, but does not crash
    del buffer
    assert sizes() == []


def test_a_socket_path_that_is_too_long_or_missing_is_a_config_error(socket_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"socket_dir.*at most"):
        engine_in(Path("/tmp") / ("x" * 90))
    sender = SenderLink.of(engine_in(socket_dir / "missing"), "s", HOST)
    with pytest.raises(ConfigError, match="missing"):
        sender.address()
    sender.close()


def test_only_sockets_of_dead_senders_are_cleared_away(engine: CheckpointEngine, socket_dir: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(socket_dir / "weightlane-dead.sock"))
    dead.close()
    alive, second = SenderLink.of(engine, "alive", HOST), SenderLink.of(engine, "second", HOST)
    names = {link.address()["sockets"]["socket"] for link in (alive, second)}
    assert {path.name for path in socket_dir.iterdir()} == names
    alive.close()
    second.close()
    assert list(socket_dir.iterdir()) == []


def inodes_of_segments(process_directory: Path) -> set[str]:
    """Inodes of the memory files that a process maps; empty when it is gone."""
    try:
        lines = (process_directory / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "memfd:weightlane" in line}


def test_an_engine_holds_no_more_shared_memory_than_it_may(sizes: Sizes, socket_dir: Path) -> None:
    engine = engine_in(socket_dir, max_shared_mib=3)
    session = Session(engine, "r")
    buffer = engine.allocate(MIB, CPU)
    with pytest.raises(StorageError, match=r"2\.5 MiB .* max_shared_mib \(3 MiB\).* 1\.0 MiB are in use"):
        engine.allocate(2 * MIB + MIB // 2, CPU)
    data = random_bytes(MIB + MIB // 3)  # for which 2 MiB would be taken if there were more
    for version, bucket in enumerate((data, buffer, data[:5], random_bytes(2 * MIB))):
        assert torch.equal(session.deliver(version, bucket), bucket)
        assert sum(sizes()) <= 2 * 3 * MIB  # both sides are in this process
    with pytest.raises(StorageError, match="max_shared_mib"):  # a bucket from elsewhere needs a copy
        session.send(Bucket(9, 0, random_bytes(2 * MIB + 1))).result()
    session.close()


def test_memory_that_the_machine_does_not_have_is_refused_in_words_and_not_by_the_kernels_killer(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = available_memory_bytes()
    assert left is not None
    assert left > 0
    with pytest.raises(StorageError, match="MiB are left"):
        engine_in(socket_dir, max_shared_mib=1 << 30).allocate(2 * left, CPU)
    monkeypatch.setattr("weightlane.ckpt_engines.engines.shared_memory.shm.available_memory_bytes", lambda: 3 * MIB)
    session, data = Session(engine_in(socket_dir), "r"), random_bytes(2 * MIB + 1)  # for which 4 MiB would be taken
    assert torch.equal(session.deliver(1, data), data)
    session.close()


def test_the_memory_that_is_left_is_the_containers_if_that_has_less_than_the_machine(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 400\n")
    for limit, used, expected in (("max", "5", 4096), ("3000", "2500", 900), ("100", "900", 0), ("9999", "1", 4096)):
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)
        assert available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None


class TestKilledSender(ConformanceBase):
    """A sender that is killed leaves nothing behind. Its socket goes when the next one starts."""

    deadline_s = grace_s = HANG_S

    @pytest.fixture
    def engine_name(self) -> str:
        return "shm"

    def test_its_memory_has_no_name_and_goes_with_the_last_receiver(self, connected: ConnectionMaker) -> None:
        connection = connected(2)
        connection.deliver([Parcel(1, 0, MIB, 1)])
        held = inodes_of_segments(Path(f"/proc/{connection.sender.pid}"))
        assert held
        for half in connection.halves:
            assert "/dev/shm" not in Path(f"/proc/{half.pid}/maps").read_text()
        connection.start_send([Parcel(1, 1, MIB, 2)])  # nobody receives, so the sender waits
        time.sleep(self.settle_s)
        connection.sender.kill()
        for half in connection.receivers:
            half.call("close")
        left = [path for path in Path("/proc").glob("[0-9]*") if inodes_of_segments(path) & held]
        assert left == []


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


def test_a_receiver_in_a_container_of_its_own_needs_to_share_nothing_but_the_sockets_directory(
    socket_dir: Path, children: Any, forks: ForkServer
) -> None:
    if reason := no_namespaces():
        pytest.skip(f"this machine lets nobody make namespaces: {reason}")
    sender = RemoteHalf(forks.fork(f"{half_process.__name__}:serve"))
    # Own processes, network, System V IPC and /dev/shm, which has no room; there the directory has another path.
    mounts = "mount -t tmpfs -o nr_inodes=1 none /dev/shm && mount -t tmpfs none /run && mkdir /run/elsewhere"
    script = f'{mounts} && mount --bind {socket_dir} /run/elsewhere && exec "$@"'
    command = [*NAMESPACES, "sh", "-c", script, "sh", sys.executable, "-P", "-m", half_process.__name__]
    ours, theirs = socket.socketpair()
    with theirs:
        process = children.start(["-c", f"import os; os.execvp({command[0]!r}, {command!r})"], stdin=theirs)
    receiver = RemoteHalf(ForkedProcess(process.pid, JsonSocket(ours)))
    halves = (sender, receiver)
    for half in halves:
        half.grace_s = HANG_S
        assert half.call("unpickled") == 0  # it is there
    kinds = ("user", "mnt", "net", "ipc")
    assert len({Path(f"/proc/{half.pid}/ns/{kind}").readlink() for half in halves for kind in kinds}) == 8
    receiver.call("make", side="sender", engine="shm", options={}, name="s")
    with pytest.raises(StorageError, match=r"No space left on device.*options\.socket_dir"):
        receiver.call("address")
    sender.call("make", side="sender", engine="shm", options={"socket_dir": str(socket_dir)}, name="s")
    address = sender.call("address")
    for options in ({}, {"socket_dir": "/run/elsewhere"}):
        receiver.call("close")
        receiver.call("make", side="receiver", engine="shm", options=options, name="r")
        topology = {"senders": {"s": address}, "receivers": {"r": receiver.call("address")}, "session": "s", "key": ""}
        if not options:
            with pytest.raises(PeerLostError, match=r"ENOENT.*options\.socket_dir"):
                receiver.call("connect", topology=topology, deadline_s=HANG_S)
    for half in halves:
        half.start("connect", topology=topology, deadline_s=HANG_S)
    for half in halves:
        half.result()
    parcels = [Parcel(1, 0, 3 * MIB, 1), Parcel(1, 1, 0, 2), Parcel(1, 2, 70_001, 3)]
    receiver.start("receive", parcels=parcels, sender="s", deadline_s=HANG_S)
    sender.call("send", parcels=parcels, receivers=["r"], deadline_s=HANG_S)
    assert receiver.result() == [""] * 3
    receiver.start("receive", parcels=[Parcel(2, 0, 1, 1)], sender="s", deadline_s=HANG_S)
    sender.kill()
    with pytest.raises(PeerLostError):
        receiver.result()
    receiver.kill()
