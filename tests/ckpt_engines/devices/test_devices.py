"""A device is said with its index, and what differs between a CPU and an accelerator stands in one place."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime import devices
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, checked_device, runtime_of


def test_an_accelerator_without_an_index_is_refused_with_what_to_write() -> None:
    for device in ("npu" if hasattr(torch, "npu") else "xpu", torch.device("cuda")):
        with pytest.raises(ConfigError, match=r"(cuda|npu|xpu) is not one device.*:0") as refused:
            checked_device(device, "trainer.device")
        assert refused.value.part == "trainer.device"
        with pytest.raises(ConfigError):
            runtime_of(torch.device(device))


def test_an_accelerator_with_its_index_is_that_device_and_there_is_one_cpu() -> None:
    for device in ("cuda:3", torch.device("cuda", 1)):
        assert checked_device(device) == torch.device(device)
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert checked_device(device) == HOST
        assert checked_device(device).index is None
        assert runtime_of(torch.device(device)).device == HOST


def test_on_a_cpu_everything_is_over_when_a_call_returns() -> None:
    runtime = runtime_of(HOST)
    assert type(runtime) is DeviceRuntime
    assert not runtime.has_streams
    memory = torch.zeros(10, dtype=torch.uint8)
    stream = runtime.stream_for(runtime)
    with runtime.current(), runtime.on(stream):
        event = runtime.record_event(stream)
    runtime.wait_for(stream, event)
    runtime.record_stream(memory, stream)
    runtime.empty_cache()
    assert (stream, event, runtime.record_event()) == (None, None, None)
    assert not runtime.register_host(memory.data_ptr(), 10)
    runtime.unregister_host(memory.data_ptr())


def test_host_memory_that_cuda_does_not_register_is_said_once_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices._say_unregistered.cache_clear()
    asked: list[tuple[int, ...]] = []

    def register(*arguments: int) -> int:
        asked.append(arguments)
        return 2

    cuda = types.SimpleNamespace(
        device=lambda _: contextlib.nullcontext(), cudart=lambda: types.SimpleNamespace(cudaHostRegister=register)
    )
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # takes the error from CUDA
    runtime = devices.CudaRuntime(torch.device("cuda", 0), cuda)
    assert [runtime.register_host(4096, 10, read_only=read_only) for read_only in (False, True)] == [False, False]
    assert asked == [(4096, 10, 1), (4096, 10, 9)]
    (said,) = caplog.messages
    assert ("error 2" in said, "ulimit -l" in said) == (True, True)
