"""`RankWorker` adds a free address and the publisher's fence to its training engines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any

import pytest

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.ckpt_engines.channels.listener import listen_tcp
from weightlane.trainer import TokenBatch, TokenSequence, sft
from weightlane.trainer.dispatch.rank_worker import HostedRole, RankWorker
from weightlane.trainer.dispatch.residency import Moves
from weightlane.trainer.engines.contract import BackwardResult

BATCH = TokenBatch((TokenSequence.of_completion([1], [2]),))


def hosting(engine: Any, publisher: Any = None) -> RankWorker:
    worker = RankWorker(0, 1)
    worker._roles["policy"] = HostedRole(engine, {"loss": sft}, publisher)
    return worker


def test_the_port_of_the_ranks_group_is_nobody_elses_until_a_rank_listens_there() -> None:
    worker = RankWorker(0, 1)
    host, port = worker.free_address("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    with closing(listen_tcp(host, port)) as listener:
        socket.create_connection(listener.getsockname()).close()
    with pytest.raises(ConfigError, match="Use an address of this machine"):
        worker.free_address("203.0.113.1")


class Publisher:
    """Notes what the fence is asked for."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done

    def fence(self, names: Collection[str] | None = None) -> float:
        self._done.append(("read", list(names or ())))
        return 0.25

    def publish(self, version: int) -> None:
        self._done.append(f"published {version}")


def test_no_part_of_the_parameters_changes_before_the_publisher_has_read_it() -> None:
    """Nor does the published adapter before another one is copied into it."""
    parts, done = [["embed", "norm"], ["head"], ["layer"]], []

    class Engine:
        has_adapters = True

        def steps_of(self, adapter: str | None) -> int:
            assert adapter is None
            return 1

        def forward_backward(self, *_: Any) -> BackwardResult:
            return BackwardResult({"loss": 0.5})

        def optim_step(self, before_change: Callable[[Collection[str]], None], *_: Any) -> float:
            for part in parts:
                before_change(part)
                done.append(("changed", part))
            return 2.0

        def load_published(self, before_change: Callable[[Collection[str]], None], adapter: str) -> None:
            before_change(["A", "B"])
            done.append(f"copied {adapter}")

    worker = hosting(Engine(), Publisher(done))
    metrics, _ = worker.forward_backward("policy", BATCH, "loss")
    result = worker.optim_step("policy")
    assert done == [(what, part) for part in parts for what in ("read", "changed")]
    assert (result.step, metrics, result.grad_norm, result.fence_s) == (1, {"loss": 0.5}, 2.0, 0.75)
    done.clear()
    worker.publish("policy", 7, "a")
    assert done == [("read", ["A", "B"]), "copied a", "published 7"]


def test_parameters_are_moved_and_a_state_is_loaded_only_once_the_publisher_has_read_them() -> None:
    done: list[Any] = []

    class Engine:
        step = 3
        offloaded: frozenset[str] = frozenset()

        def offload(self, parts: Collection[str]) -> None:
            done.append(("offload", sorted(parts)))
            self.offloaded = frozenset(parts)

        def onload(self, parts: Collection[str]) -> None:
            done.append(("onload", sorted(parts)))

        def load(self, _: str, *, optimizer: bool) -> None:
            assert optimizer
            done.append("load")

    worker = hosting(Engine(), Publisher(done))
    worker.call("policy", Moves({"policy": frozenset({"optimizer"})}), "rest")
    assert done == [("offload", ["optimizer"])], "the optimizer's state is nobody else's"
    done.clear()
    worker.call("policy", Moves({"policy": frozenset({"parameters"})}), "rest")
    assert done == [("read", []), ("offload", ["parameters"])]
    assert worker._roles["policy"].fence_s == 0.25, "the next step reports it"
    done.clear()
    moves = Moves(here={"policy": frozenset({"parameters", "optimizer"})})
    assert worker.call("policy", moves, "load", "state") == 3
    assert done == [("onload", ["optimizer", "parameters"]), ("read", []), "load"]


def test_a_role_or_a_loss_that_is_not_there_is_named() -> None:
    worker = hosting(None)
    with pytest.raises(ProtocolError, match=r"no loss called 'los'.*It has loss"):
        worker.forward_backward("policy", BATCH, "los")
    with pytest.raises(ProtocolError, match="role 'critic' was used before setup"):
        worker.optim_step("critic")
