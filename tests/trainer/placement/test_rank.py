"""`TrainerRank` adds a free address, the publisher's fence and skipped steps to its training engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

import pytest

from weightlane.ckpt_engines import ConfigError, GradientError
from weightlane.ckpt_engines.channels.listener import listen_tcp
from weightlane.trainer import TokenBatch, TokenSequence, TrainerConfig, sft
from weightlane.trainer.engines.contract import BackwardResult
from weightlane.trainer.placement.trainer_rank import TrainerRank


def test_the_port_of_the_ranks_group_is_nobody_elses_until_a_rank_listens_there() -> None:
    rank = TrainerRank(TrainerConfig(), sft, 0, 1)
    host, port = rank.free_address("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    with closing(listen_tcp(host, port)) as listener:
        socket.create_connection(listener.getsockname()).close()
    with pytest.raises(ConfigError, match="Use an address of this machine"):
        rank.free_address("203.0.113.1")


def test_no_part_of_the_parameters_changes_before_the_publisher_has_read_it() -> None:
    parts, done = [["embed", "norm"], ["head"], ["layer"]], []

    class Publisher:
        def fence(self, names: Collection[str]) -> float:
            done.append(("read", list(names)))
            return 0.25

    class Engine:
        step = 1

        def forward_backward(self, *_: Any) -> BackwardResult:
            return BackwardResult({"loss": 0.5})

        def optim_step(self, before_change: Callable[[Collection[str]], None]) -> float:
            for part in parts:
                before_change(part)
                done.append(("changed", part))
            return 2.0

    rank: Any = TrainerRank(TrainerConfig(), sft, 0, 1)
    rank._engine, rank._publisher = Engine(), Publisher()
    report = rank.train_step(TokenBatch((TokenSequence.of_completion([1], [2]),)))
    assert done == [(what, part) for part in parts for what in ("read", "changed")]
    assert (report.step, report.metrics, report.grad_norm, report.fence_s) == (1, {"loss": 0.5}, 2.0, 0.75)


def test_a_gradient_that_is_not_finite_is_a_step_that_was_skipped() -> None:
    class Engine:
        step = 7

        def forward_backward(self, *_: Any) -> BackwardResult:
            return BackwardResult({"loss": 0.5})

        def optim_step(self, _: Callable[[Collection[str]], None]) -> float:
            raise GradientError("the gradient norm is nan.", part="trainer rank 0")

    rank: Any = TrainerRank(TrainerConfig(), sft, 0, 1)
    rank._engine = Engine()
    report = rank.train_step(TokenBatch((TokenSequence.of_completion([1], [2]),)))
    assert (report.step, report.skipped) == (7, "trainer rank 0: the gradient norm is nan.")
