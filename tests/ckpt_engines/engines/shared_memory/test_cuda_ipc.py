"""The CUDA IPC engine. Its protocol is that of ``shm`` and tested there; here is what concerns device memory.

Nearly all of it needs a GPU: one is enough, since two processes may share it.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import KEYS
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import CheckpointEngineRegistry, TransportError
from weightlane.ckpt_engines.channels.channel import Channel
from weightlane.ckpt_engines.conformance import run_conformance
from weightlane.ckpt_engines.conformance.checks.base import ConformanceBase, ConnectionMaker
from weightlane.ckpt_engines.conformance.processes.payload import Parcel
from weightlane.ckpt_engines.engines.shared_memory import receiver as _segment_receiver
from weightlane.ckpt_engines.engines.shared_memory.cuda_ipc import CudaArena
from weightlane.ckpt_engines.engines.shared_memory.segments import Segment, SegmentMapping
from weightlane.ckpt_engines.waits import Lifecycle

NO_GPU = CheckpointEngineRegistry().engine_class("cuda_ipc").unavailable_reason()
needs_gpu = pytest.mark.skipif(NO_GPU is not None, reason=f"cuda_ipc cannot run here: {NO_GPU}")
MIB = 1 << 20


@pytest.mark.gpu
@needs_gpu
def test_the_whole_conformance_suite_passes_on_the_devices_there_are() -> None:
    report = run_conformance("cuda_ipc", limits=dict.fromkeys(("deadline_s", "slack_s", "prompt_s", "grace_s"), HANG_S))
    assert report.passed, "\n".join(check.detail for check in report.checks if check.detail)


@pytest.mark.gpu
@needs_gpu
class TestDeviceMemory(ConformanceBase):
    """Device memory is freed after every connection and after a kill on either side. Halves share the available devices."""

    @pytest.fixture
    def engine_name(self) -> str:
        return "cuda_ipc"

    @pytest.fixture
    def engine_options(self, socket_dir: Path) -> dict[str, Any]:
        return {"socket_dir": str(socket_dir)}

    def test_device_memory_is_given_back_after_every_connection(self, halves: ConnectionMaker) -> None:
        connection = halves(1)
        free = []
        for round_number in range(6):
            connection.make()
            connection.connect()
            connection.deliver([Parcel(1, 0, 64 * MIB, round_number)])
            connection.close()
            free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] >= free[1] - 16 * MIB  # the first rounds set up contexts

    @pytest.mark.parametrize("dies", ["sender", "receiver"])
    def test_a_kill_on_either_side_gives_the_device_memory_back(self, connected: ConnectionMaker, dies: str) -> None:
        before = torch.cuda.mem_get_info()[0]
        connection = connected(1)
        connection.deliver([Parcel(1, 0, 256 * MIB, 1)])
        doomed, other = connection.sender, connection.receivers[0]
        if dies == "receiver":
            doomed, other = other, doomed
        doomed.kill()
        other.call("close")
        enough = before - 700 * MIB  # contexts of live processes remain
        wait_until(lambda: torch.cuda.mem_get_info()[0] >= enough, "device memory")


def test_a_bucket_outside_of_cuda_memory_is_refused_and_descriptors_that_its_sender_passed_are_closed() -> None:
    passed = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(TransportError, match="cpu"):
        CudaArena("cuda_ipc").map_segment(MIB, {}, (passed,), torch.device("cpu"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(passed)


class Something(Segment):
    """Stands for device memory."""

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        return {}, ()

    def retire(self) -> None:
        raise AssertionError("its owner lets go of it, and nobody else does")


def test_memory_is_held_until_the_last_receiver_that_may_map_it_has_hung_up() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    life = Lifecycle("sender", lambda: None)
    segment = Something()
    gone = weakref.ref(segment)
    CudaArena("cuda_ipc").before_close([Channel(ours, KEYS, life, "receiver") for ours, _ in pairs], [segment])
    del segment
    (_, first), (_, second) = pairs
    first.close()
    assert second.recv(1) == b""  # it is told
    time.sleep(0.05)  # in which it would go if the first one counted for both
    assert gone() is not None
    second.close()
    wait_until(lambda: gone() is None, "end of the memory")
    life.close()


class Copying(SegmentMapping):
    """Stands for mapped memory out of which a copy may still run."""

    def __init__(self) -> None:
        self.over = self.closed = False

    def copied(self) -> bool:
        return self.over

    def start_copy(self, offset: int, into: torch.Tensor, after: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        assert self.over, "a copy runs"
        self.closed = True


def test_a_receiver_that_is_closed_during_a_copy_is_not_taken_for_gone_before_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_segment_receiver, "_LAST_COPY_WAIT_S", 0.05)
    ours, senders = socket.socketpair()
    life = Lifecycle("receiver", lambda: None)
    receiver = _segment_receiver.SegmentReceiver("receiver", CudaArena("cuda_ipc"), torch.device("cpu"))
    receiver._channels = {"s": Channel(ours, KEYS, life, "s")}
    stuck, ended = Copying(), Copying()
    ended.over = True
    receiver._mappings = {("s", 0): stuck, ("s", 1): ended}
    receiver.close()
    assert ended.closed
    senders.setblocking(False)
    with pytest.raises(BlockingIOError):  # and so the sender keeps its memory
        senders.recv(1)
    stuck.over = True
    senders.settimeout(HANG_S)
    assert senders.recv(1) == b""
    assert stuck.closed
    senders.close()
    life.close()
