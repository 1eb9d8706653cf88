"""Stores and groups beside torch.distributed's own: bound to one address, typed errors, no global state."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_faults import publish_and_never_call
from sessions import soon
from waiting import HANG_S, NEVER_S

from weightlane.ckpt_engines import (
    AddressInUseError,
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    EngineUnavailableError,
    PeerLostError,
    TransportError,
)
from weightlane.ckpt_engines.engines.torch_distributed import gloo_connect
from weightlane.ckpt_engines.engines.torch_distributed.gloo_connect import connect_gloo
from weightlane.ckpt_engines.engines.torch_distributed.process_group import (
    Group,
    abandon_gloo,
    host_store,
    join_store,
    open_process_group,
    reserve_port,
    start_broadcast,
    translate,
)
from weightlane.ckpt_engines.waits import Lifecycle


def gloo_pair() -> list[Group]:
    """Both members of a gloo group, in this process."""
    store, port = host_store("127.0.0.1")

    def join() -> Group:
        other = dist.PrefixStore("group", join_store("127.0.0.1", port, soon()))
        return open_process_group("gloo", other, 1, 2, soon())

    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join)
        return [open_process_group("gloo", dist.PrefixStore("group", store), 0, 2, soon()), joining.result()]


def broadcast(first: Group, second: Group) -> None:
    """From the first member to the second, without any global group."""
    sent, received = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    for work in [start_broadcast(first, sent, 0, soon()), start_broadcast(second, received, 0, soon())]:
        work.wait()
    assert torch.equal(sent, received)


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_typed_errors(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(AddressInUseError, match=str(free_port)):
        host_store("127.0.0.1", free_port)
    for listen in (host_store, reserve_port):
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            listen("192.0.2.1")


def test_joining_a_store_that_is_not_there_fails_at_once(free_port: int) -> None:
    with pytest.raises(PeerLostError, match=str(free_port)):
        join_store("127.0.0.1", free_port, Deadline.after(NEVER_S))


def test_joining_a_store_that_says_nothing_ends_at_the_deadline_or_when_the_half_is_closed() -> None:
    """The system accepts connections for a process that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeadlineExceededError, match=r"peer trainer.*store at 127\.0\.0\.1"):
            join_store("127.0.0.1", port, Deadline.after(0.2), "trainer")
        life = Lifecycle("receiver", lambda: None)
        threading.Timer(0.1, life.close).start()
        with pytest.raises(ClosedError), life.call():
            join_store("127.0.0.1", port, Deadline.after(NEVER_S), life=life)


def test_a_connection_that_gloo_loses_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_connect, "_LONGEST_TRY_S", 1.0)  # all of which gloo waits for the lost connection
    monkeypatch.setattr(gloo_connect, "_GRACE_S", HANG_S)
    tries: list[dist.Store] = []
    undone: list[dist.Store] = []
    store, port = host_store("127.0.0.1")

    def connect(place: dist.Store, timeout: timedelta) -> Any:
        tries.append(place)
        if len(tries) == 1:
            return publish_and_never_call(place, 1, timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return dist.ProcessGroupGloo(place, 1, 2, options)

    def join() -> Any:
        place = dist.PrefixStore("group", join_store("127.0.0.1", port, soon()))
        return connect_gloo(place, 1, 2, soon(), connect, undo=lambda: undone.append(place))

    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join)
        first = open_process_group("gloo", dist.PrefixStore("group", store), 0, 2, soon())
        second = joining.result(HANG_S)
    assert len(undone) == len(tries) - 1 >= 1
    broadcast(first, second)
    assert not dist.is_initialized()


def test_a_connection_that_gloo_never_makes_ends_at_the_deadline() -> None:
    timeouts: list[timedelta] = []
    store, port = host_store("127.0.0.1")

    def connect(place: dist.Store, timeout: timedelta) -> None:
        timeouts.append(timeout)
        publish_and_never_call(place, 1, timeout)

    def join() -> Any:
        deadline = Deadline.after(1.5)
        place = dist.PrefixStore("group", join_store("127.0.0.1", port, deadline))
        return connect_gloo(place, 1, 2, deadline, connect, undo=lambda: None)

    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join)
        with pytest.raises(DeadlineExceededError, match=r"a group of 2"):
            open_process_group("gloo", dist.PrefixStore("group", store), 0, 2, Deadline.after(1.5))
        assert isinstance(joining.exception(HANG_S), DeadlineExceededError)
    assert all(5 * timeout.total_seconds() <= 1.5 for timeout in timeouts)  # for so many times its timeout gloo waits


def test_a_member_that_comes_and_is_not_heard_of_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_connect, "_LONGEST_TRY_S", 0.2)
    monkeypatch.setattr(gloo_connect, "_GRACE_S", 0.2)
    store, _ = host_store("127.0.0.1")
    store.set("try0/here/1", "")
    store.add("try0/here", 1)
    with pytest.raises(PeerLostError, match="rank 1 joined the group and then fell silent"):
        open_process_group("gloo", store, 0, 2, Deadline.after(NEVER_S))


def test_an_abandoned_gloo_group_fails_its_pending_operations_at_once() -> None:
    first, second = gloo_pair()
    deadline = Deadline.after(NEVER_S)
    pending = start_broadcast(second, torch.zeros(100, dtype=torch.uint8), 0, deadline)
    abandon_gloo(second)
    with pytest.raises(RuntimeError):
        pending.wait()
    closure = RuntimeError("Application timeout caused pair closure")
    assert isinstance(translate(closure, "x", deadline, "y"), TransportError)
    nccl = RuntimeError(
        "NCCL error in: x.cpp:210, invalid usage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1\n"
    )
    assert "failed: Duplicate GPU detected : rank 0 and rank 1" in str(translate(nccl, "x", deadline, "y"))
    del first


def test_the_accelerator_backends_say_what_is_missing_instead_of_failing_in_c_plus_plus() -> None:
    store = dist.HashStore()
    with pytest.raises(TransportError, match="device"):
        open_process_group("nccl", store, 0, 2, soon())
    if not dist.is_nccl_available():
        with pytest.raises(EngineUnavailableError, match="NCCL"):
            open_process_group("nccl", store, 0, 2, soon(), device=torch.device("cuda"))
    with pytest.raises(EngineUnavailableError, match="torch_npu"):
        open_process_group("hccl", store, 0, 2, soon(), device=torch.device("cpu"))


LOST = """
from concurrent.futures import ThreadPoolExecutor

import torch
from weightlane.ckpt_engines import Bucket, CheckpointEngineRegistry, Deadline, Topology
from weightlane.ckpt_engines.engines.torch_distributed import gloo

engine = CheckpointEngineRegistry().create("gloo")
sender, receiver = engine.make_sender("t", torch.device("cpu")), engine.make_receiver("r", torch.device("cpu"))
topology = Topology("s", {"t": sender.address()}, {"r": receiver.address()}, key=bytes(32))
with ThreadPoolExecutor(1) as threads:
    joining = threads.submit(receiver.connect, topology, {}, Deadline.after(60))
    sender.connect(topology, {}, Deadline.after(60))
    joining.result()
gloo.abandon_gloo = lambda group: None
receiver.post(Bucket(1, 0, torch.zeros(8, dtype=torch.uint8)), "t")
receiver.close()
del receiver
gloo.keep_for_ever(sender._groups["everyone"])  # its end would be the transfer's, too
print("closed")
"""


def test_a_receiver_whose_transfer_gloo_has_lost_can_be_closed_and_its_program_ends(children: Any) -> None:
    assert children.run(["-c", LOST]) == (0, "closed\n", "")
