"""Failures of the trainer ranks' collectives. A stand-in says what torch's watchdog of a group would have found."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, PeerLostError
from weightlane.trainer.engines import nccl_watchdog
from weightlane.trainer.engines.rank_collectives import group_backend, typed_collective_errors


def test_what_the_watchdog_of_nccl_finds_is_an_error_of_the_call_and_never_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in nccl_watchdog._SETTINGS:
        monkeypatch.setenv(name, "the user's")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert group_backend(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2", "1 and 3 end the process, 0 waits for ever"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "the user's"

    found = ["SUCCESS", "SUCCESS"]

    def group(rank: int) -> Any:
        backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=found[rank]))
        return SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=lambda device: backend)

    on_cpus = SimpleNamespace(_device_types=[torch.device("cpu")])
    monkeypatch.setattr(nccl_watchdog, "_groups", lambda: [on_cpus, group(0), group(1)])
    for name, error in (("TIMEOUT", DeadlineExceededError), ("COMM_ERROR", PeerLostError)):
        found[1] = "SUCCESS"
        with typed_collective_errors("a pass", "trainer rank 0", 7):
            pass
        with pytest.raises(error, match="a pass"), typed_collective_errors("a pass", "trainer rank 0", 7):
            found[1] = name  # and the aborted collective returns as if it were done
        blamed = ConfigError("the loss is not a number.", part="x")
        with pytest.raises(error), typed_collective_errors("a pass", "trainer rank 0", 7):
            raise blamed
