"""Stores and groups beside torch.distributed's own: bound to one address, typed errors, no global state."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from gloo_faults import publish_and_never_call

from weightlane.ckpt_engines import (
    AddressInUseError,
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    EngineUnavailableError,
    PeerLostError,
    TransportError,
    gloo_connect,
)
from weightlane.ckpt_engines.gloo_connect import connect_gloo
from weightlane.ckpt_engines.process_group import (
    Group,
    abandon_gloo,
    host_store,
    join_store,
    open_process_group,
    start_broadcast,
    translate,
)


def gloo_pair(deadline: Deadline) -> list[Group]:
    """Both members of a gloo group, in this process."""
    store, port = host_store("127.0.0.1")
    groups: list[Any] = [None, None]

    def join() -> None:
        other = dist.PrefixStore("group", join_store("127.0.0.1", port, deadline))
        groups[1] = open_process_group("gloo", other, 1, 2, deadline)

    thread = threading.Thread(target=join)
    thread.start()
    groups[0] = open_process_group("gloo", dist.PrefixStore("group", store), 0, 2, deadline)
    thread.join(5)
    return groups


def test_a_store_listens_on_its_own_address_only() -> None:
    store, port = host_store("127.0.0.1")
    listening = [
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr and c.laddr.port == port and not c.raddr
    ]
    assert listening == ["127.0.0.1"]
    client = join_store("127.0.0.1", port, Deadline.after(5))
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_is_taken_is_an_address_in_use_error(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(AddressInUseError, match=str(free_port)):
        host_store("127.0.0.1", free_port)
    store, port = host_store("127.0.0.1", free_port)
    assert port == free_port
    del store


def test_an_address_of_another_machine_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        host_store("192.0.2.1")


def test_joining_a_store_that_is_not_there_fails_at_once(free_port: int) -> None:
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=str(free_port)):
        join_store("127.0.0.1", free_port, Deadline.after(20))
    assert time.monotonic() - started < 2


def test_a_group_broadcasts_without_any_global_group() -> None:
    deadline = Deadline.after(10)
    first, second = gloo_pair(deadline)
    sent, received = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    works = [start_broadcast(first, sent, 0, deadline), start_broadcast(second, received, 0, deadline)]
    for work in works:
        work.wait()
    assert torch.equal(sent, received)
    assert not dist.is_initialized()


def test_a_group_whose_member_never_comes_ends_at_the_deadline() -> None:
    store, _ = host_store("127.0.0.1")
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        open_process_group("gloo", store, 0, 2, Deadline.after(0.5))
    assert time.monotonic() - started < 1.5


def join_beside(connect: Callable[[dist.Store, timedelta], Any]) -> tuple[dist.Store, threading.Thread, list[Any]]:
    """The store of a group of two, whose rank 1 joins in a thread by `connect`, and what it gets."""
    store, port = host_store("127.0.0.1")
    got: list[Any] = []

    def join() -> None:
        place = dist.PrefixStore("group", join_store("127.0.0.1", port, Deadline.after(20)))
        try:
            got.append(connect_gloo(place, 1, 2, Deadline.after(6), connect, undo=lambda: got.append("undone")))
        except DeadlineExceededError as error:
            got.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    return dist.PrefixStore("group", store), thread, got


def test_a_connection_that_gloo_loses_is_made_again() -> None:
    tries = 0

    def connect(place: dist.Store, timeout: timedelta) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            return publish_and_never_call(place, 1, timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        return dist.ProcessGroupGloo(place, 1, 2, options)

    store, thread, got = join_beside(connect)
    first = open_process_group("gloo", store, 0, 2, Deadline.after(6))
    thread.join(5)
    undone, second = got
    assert (undone, tries) == ("undone", 2)
    sent, received = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    deadline = Deadline.after(5)
    for work in [start_broadcast(first, sent, 0, deadline), start_broadcast(second, received, 0, deadline)]:
        work.wait()
    assert torch.equal(sent, received)


def test_a_connection_that_gloo_never_makes_ends_at_the_deadline() -> None:
    store, thread, got = join_beside(lambda place, timeout: publish_and_never_call(place, 1, timeout))
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"a group of 2"):
        open_process_group("gloo", store, 0, 2, Deadline.after(1.5))
    assert time.monotonic() - started < 4  # gloo alone waits for 7.5, and for 5 in one try
    thread.join(10)
    assert isinstance(got[-1], DeadlineExceededError)


def test_a_member_that_comes_and_is_not_heard_of_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_connect, "_GRACE_S", 0.2)
    store, _ = host_store("127.0.0.1")
    store.set("try0/here/1", "")
    store.add("try0/here", 1)
    with pytest.raises(PeerLostError, match="rank 1 came to the group and was not heard of again"):
        open_process_group("gloo", store, 0, 2, Deadline.after(6))


def test_an_abandoned_gloo_group_fails_its_pending_operations_at_once() -> None:
    first, second = gloo_pair(Deadline.after(10))
    deadline = Deadline.after(30)
    pending = start_broadcast(second, torch.zeros(100, dtype=torch.uint8), 0, deadline)
    started = time.monotonic()
    abandon_gloo(second)
    with pytest.raises(RuntimeError):
        pending.wait()
    assert time.monotonic() - started < 2
    assert isinstance(
        translate(RuntimeError("Application timeout caused pair closure"), "x", deadline, "y"), TransportError
    )
    del first


def test_the_accelerator_backends_say_what_is_missing_instead_of_failing_in_c_plus_plus() -> None:
    store = dist.HashStore()
    with pytest.raises(TransportError, match="device"):
        open_process_group("nccl", store, 0, 2, Deadline.after(1))
    if not dist.is_nccl_available():
        with pytest.raises(EngineUnavailableError, match="NCCL"):
            open_process_group("nccl", store, 0, 2, Deadline.after(1), device=torch.device("cuda"))
    with pytest.raises(EngineUnavailableError, match="torch_npu"):
        open_process_group("hccl", store, 0, 2, Deadline.after(1), device=torch.device("cpu"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_address_is_refused_as_an_option(host: str) -> None:
    with pytest.raises(ConfigError, match="wildcard"):
        CheckpointEngineRegistry().create("gloo", {"host": host})


def test_an_interface_gives_its_address_and_an_unknown_one_is_a_config_error() -> None:
    registry = CheckpointEngineRegistry()
    sender = registry.create("gloo", {"interface": "lo"}).make_sender("s")
    assert sender.address()["host"] == "127.0.0.1"
    sender.close()
    sender = registry.create("gloo", {"interface": "nosuch0"}).make_sender("s")
    with pytest.raises(ConfigError, match="nosuch0"):
        sender.address()
    sender.close()
