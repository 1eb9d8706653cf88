"""The torch.distributed engines: what they share over gloo, and what of NCCL and HCCL needs no device.

What is marked ``gpu`` or ``npu`` runs on a machine that has at least two such devices. How their halves order streams and events
is tested in ``checked_device``, on devices that are made up.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    ProtocolError,
    Topology,
    TransportError,
)
from weightlane.ckpt_engines.conformance import run_conformance
from weightlane.ckpt_engines.engines.torch_distributed import device_group as _device_group
from weightlane.ckpt_engines.engines.torch_distributed.collective_halves import CollectiveReceiver, CollectiveSender
from weightlane.ckpt_engines.engines.torch_distributed.device_group import DeviceGroup, open_device_group
from weightlane.ckpt_engines.engines.torch_distributed.group_engine import TorchDistributedConfig
from weightlane.ckpt_engines.engines.torch_distributed.process_group import nccl_blocking, open_process_group
from weightlane.ckpt_engines.links import SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST, device_count, runtime_of
from weightlane.ckpt_engines.waits import Lifecycle


def test_a_gloo_group_that_is_never_complete_says_who_is_missing() -> None:
    sender = CheckpointEngineRegistry().create("gloo").make_sender("s", HOST)
    topology = Topology("session", {"s": sender.address()}, {"r-0": {}, "r-1": {}})
    with pytest.raises(DeadlineExceededError, match="r-0, r-1 of a group of 3") as failure:
        sender.connect(topology, {}, Deadline.after(0.2))
    assert failure.value.peer == "r-0, r-1"
    sender.close()


def test_a_half_that_is_not_among_the_participants_says_so() -> None:
    halves = [
        CheckpointEngineRegistry().create("gloo").make_receiver("stranger", HOST),
        CollectiveReceiver("stranger", TorchDistributedConfig(), "nccl", HOST),
        CollectiveSender("stranger", TorchDistributedConfig(), "nccl", HOST),
    ]
    topology = Topology("session", {"s": {"host": "127.0.0.1", "port": 1}}, {"r-0": {}})
    for half in halves:
        with pytest.raises(ProtocolError, match=r"stranger is not among the participants .*r-0"):
            half.connect(topology, {}, Deadline.after(HANG_S))  # type: ignore[attr-defined]
        half.close()  # type: ignore[attr-defined]


def needs(engine: str) -> pytest.MarkDecorator:
    """Skip, with the reason, where `engine` cannot run."""
    reason = CheckpointEngineRegistry().engine_class(engine).unavailable_reason()
    return pytest.mark.skipif(reason is not None, reason=f"{engine} cannot run here: {reason}")


class StuckBackend:
    """A backend whose communicator cannot be aborted, as NCCL's while another thread waits for it to connect."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        self.entered = 0

    def abort(self) -> None:
        self.entered += 1
        self.freed.wait(NEVER_S)


def test_leaving_a_group_does_not_wait_for_a_library_that_never_returns_from_its_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightlane.ckpt_engines.engines.torch_distributed.device_group._ABORT_WAIT_S", 0.05)
    backend = StuckBackend()
    group = DeviceGroup(backend, runtime_of(HOST), "half", "")  # type: ignore[arg-type]
    group.close()
    wait_until(lambda: backend.entered == 1, "abort")
    group.close()
    assert backend.entered == 1
    backend.freed.set()


def test_a_closed_half_has_let_go_of_its_group() -> None:
    """Which has the store, with a port and a thread; a half itself stays until garbage is collected."""
    backend, half = StuckBackend(), CollectiveSender("half", TorchDistributedConfig(), "nccl", HOST)
    backend.freed.set()
    half._group = DeviceGroup(backend, runtime_of(HOST), "half", "")  # type: ignore[arg-type]
    group = weakref.ref(half._group)
    gc.disable()
    try:
        half.close()
        wait_until(lambda: group() is None, "the group's end")
    finally:
        gc.enable()
    assert backend.entered == 1


def test_a_group_that_is_opened_just_after_its_deadline_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look at whether it is open and the error."""
    backend = StuckBackend()
    backend.freed.set()
    late, opened = threading.Event(), threading.Event()

    def open_late(*_: Any, **__: Any) -> StuckBackend:
        late.wait(HANG_S)
        return backend

    def clock() -> float:
        """The time that the waiting thread sees: it is up, and by when it is told so for the second time the group is open."""
        if threading.current_thread() is threading.main_thread() and next(looks):
            late.set()
            opened.wait(HANG_S)
        return 1.0

    looks, life = itertools.count(), Lifecycle("half", lambda: None)
    monkeypatch.setattr(life, "ring", opened.set)
    monkeypatch.setattr(_device_group, "open_process_group", open_late)
    monkeypatch.setattr(DeviceGroup, "warm_up", lambda *_: None)
    with pytest.raises(DeadlineExceededError, match=r"half \(peer other\)"):
        open_device_group(
            "nccl",
            HOST,
            dist.HashStore(),
            rank=0,
            senders=1,
            names=["half", "other"],
            host="127.0.0.1",
            deadline=Deadline(1.0, clock),
            life=life,
        )
    assert backend.entered == 1
    life.close()


class FailedWork:
    """Work that is over, behind which no event comes: so it has failed."""

    def is_completed(self) -> bool:
        return True

    def query(self) -> bool:
        return False


def test_a_transfer_that_fails_on_the_device_says_whose_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_group, "_BEHIND_S", 0.0)
    failed: Any = FailedWork()
    transfer = _device_group.DeviceTransfer(failed, failed, "nccl sender s", "r")
    assert not transfer.done()
    with pytest.raises(TransportError, match=r"nccl sender s \(peer r\): the transfer failed"):
        transfer.done()


@pytest.mark.gpu
@needs("nccl")
def test_a_field_that_this_torch_does_not_know_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no_such_field"):
        open_process_group(
            "nccl", dist.HashStore(), 0, 2, Deadline.after(1), device=torch.device("cuda", 0), nccl={"no_such_field": 1}
        )


@pytest.mark.parametrize(("queues", "reason"), [("1", "or use cuda_ipc or shm"), ("8", None), (None, None)])
def test_nccl_is_refused_where_a_gpu_has_one_queue(
    queues: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightlane.ckpt_engines.engines.torch_distributed.nccl.is_available", lambda _: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    said = CheckpointEngineRegistry().engine_class("nccl").unavailable_reason()
    assert said is None if reason is None else said is not None and said.endswith(reason)


def test_communicators_can_be_aborted_while_they_connect_unless_nccl_hangs_in_that_mode() -> None:
    assert [nccl_blocking(version) for version in ((2, 25, 1), (2, 26, 2), (2, 26, 5), (2, 27, 3))] == [0, 1, 1, 0]


def test_interfaces_are_assigned_by_rank_and_all_are_checked_before_a_run() -> None:
    registry = CheckpointEngineRegistry()
    engine = registry.create("gloo", {"interface": "lo, nosuch0"})
    for name in ("trainer/0", "trainer/2", "alone"):
        sender = SenderLink.of(engine, name, HOST)
        address = sender.address()
        assert (address["sockets"]["host"], address["engine"]["host"]) == ("127.0.0.1", "127.0.0.1")
        sender.close()
    with pytest.raises(ConfigError, match="nosuch0"):
        SenderLink.of(engine, "trainer/1", HOST)
    with pytest.raises(ConfigError, match=r"nosuch0.*this machine: .*\blo\b"):
        engine.check(Deadline.after(HANG_S))
    registry.create("gloo", {"interface": "lo"}).check(Deadline.after(HANG_S))


@pytest.mark.parametrize(
    ("engine", "device"),
    [
        pytest.param("nccl", "cuda", marks=[pytest.mark.gpu, needs("nccl")]),
        pytest.param("hccl", "npu", marks=[pytest.mark.npu, needs("hccl")]),
    ],
)
def test_the_whole_conformance_suite_passes_on_the_device(engine: str, device: str) -> None:
    if (count := device_count(device)) < 2:
        pytest.skip(f"{engine} needs a device for each half, here are {count}")
    patient = dict.fromkeys(("deadline_s", "slack_s", "prompt_s", "grace_s"), HANG_S)
    report = run_conformance(engine, limits={"most_halves": count, **patient})
    assert report.passed, "\n".join(check.detail for check in report.checks if check.detail)
