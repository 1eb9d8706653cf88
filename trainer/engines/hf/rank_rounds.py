"""Work of several trainer ranks in short rounds: who is late or gone is named, and an error of one is raised by all.

A collective over the ranks would not do: its error doesn't name the rank that is missing. All ranks therefore pass a gate before
each round, in the store in which they met. Inside a round, ranks send each other tensors directly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from weightlane.ckpt_engines import (
    Deadline,
    DeadlineExceededError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.ckpt_engines.engines.torch_distributed.process_group import call_bounded, translate
from weightlane.ckpt_engines.waits import Lifecycle

from ..rank_collectives import share_json

_T = TypeVar("_T")
_OPEN = "open"
_GRACE_S = 5.0
"""Seconds for which a rank that lost another waits for that one's own error, which is the cause if there is one."""
_STORE = "an answer of the store of the trainer ranks"


class RankRounds:
    """This rank's end of the rounds. A context manager.

    Args:
        rank: This rank.
        world: Number of ranks. One alone needs no process group.
        device: Where the collectives of the ranks work.
        timeout_s: Seconds that the slowest rank may take for a round.
        task: What the ranks do together, for errors, such as "export the model".
    """

    def __init__(self, rank: int, world: int, device: torch.device, timeout_s: float, task: str) -> None:
        self.rank, self.world = rank, world
        self._device, self._timeout_s, self._task = device, timeout_s, task
        self._life = Lifecycle(f"trainer rank {rank}", lambda: None)
        self._store: dist.Store | None = None
        self._round = 0
        """Number of the next gate."""

    @classmethod
    def alone(cls) -> RankRounds:
        """Return the end of a rank without others."""
        return cls(0, 1, torch.device("cpu"), 0.0, "")

    def begin(self, name: str, value: Any) -> list[Any]:
        """Begin rounds under the name that rank 0 gives, and return the `value` of each rank, plain data. Collective."""
        if self.world == 1:
            return [value]
        told = share_json([name, value], self._device)
        self._store = dist.PrefixStore(f"rounds/{told[0][0]}", _get_default_store())
        return [each for _, each in told]

    def enter(self) -> None:
        """Wait until every rank calls this.

        Raises the error that a rank failed with, or `DeadlineExceededError` naming the ranks that do not come in time.
        """
        if self._store is not None:
            self._bounded(self._pass, self._timeout_s + _GRACE_S)  # after the deadline it finds out who is late
            self._round += 1

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Wrap all rounds: an error on this rank is raised on every rank, or another rank's that was first on this one."""
        try:
            yield
        except Exception as error:
            own = as_weightlane_error(error, self._life.part)
            first = self._tell(own)
            if first is error:
                raise
            raise first from error

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """Send tensors, uint8 [bytes] on the CPU, to other ranks, and receive tensors from them.

        `outgoing` is by receiver, `incoming` has numbers of bytes by sender. Returns what was received, by sender, on the CPU.
        """
        if not outgoing and not incoming:
            return {}
        # Messages end in files, so they are on the CPU, unless the group, made by the user, has no backend for it.
        place = torch.device("cpu") if "cpu:" in dist.get_backend_config() else self._device
        received = {rank: torch.empty(nbytes, dtype=torch.uint8, device=place) for rank, nbytes in incoming.items()}
        pairs = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in received.items()]
        pairs += [dist.P2POp(dist.isend, tensor.to(place), rank) for rank, tensor in outgoing.items()]
        deadline, peer = Deadline.after(self._timeout_s), "the other trainer ranks"
        try:
            works = dist.batch_isend_irecv(pairs)
            for number, work in enumerate(works):
                peer = f"trainer rank {pairs[number].peer}" if len(works) == len(pairs) else "another trainer rank"
                work.wait(deadline.timedelta())
        except RuntimeError as cause:
            task = f"{peer} to {self._task}"
            lost = translate(cause, self._life.part, deadline, task, peer)
            raise self._tell(lost, wait_s=_GRACE_S) from cause  # the peer's own error, if it says why
        return {rank: tensor.cpu() for rank, tensor in received.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def _pass(self) -> None:
        store, here = self._store, self._round
        assert store is not None
        store.set(f"at|{self.rank}", str(here))
        if store.add(f"count|{here}", 1) == self.world:
            self._decide(_OPEN)  # an error that is there stays
            for key in (f"count|{here - 1}", f"gate|{here - 1}"):  # every rank has passed that gate
                store.delete_key(key)
        with suppress(dist.DistStoreError):
            store.wait([f"gate|{here}"], timedelta(seconds=self._timeout_s))
        if not store.check([f"gate|{here}"]):
            late = [rank for rank in range(self.world) if not self._has_come(rank)]
            names = f"trainer rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
            error = DeadlineExceededError(
                f"no answer of {names} within {self._timeout_s:g} s while waiting for it to {self._task}.",
                part=self._life.part,
                peer=names,
                hint="Check that this rank is alive and its disk answers, or raise trainer.collective_timeout_s.",
            )
            self._decide(json.dumps(error.to_wire()))
        verdict = store.get(f"gate|{here}").decode()
        if verdict != _OPEN:
            raise error_from_wire(json.loads(verdict))

    def _has_come(self, rank: int) -> bool:
        key = f"at|{rank}"
        assert self._store is not None
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._round

    def _decide(self, verdict: str) -> str:
        """Put `verdict` at the next gate unless one is there; returns the one that is."""
        assert self._store is not None
        gate = f"gate|{self._round}"
        decided = self._store.compare_set(gate, "", verdict).decode()
        self._store.set(gate, decided)  # the same again: not every store tells those that wait of a `compare_set`
        return decided

    def _tell(self, error: WeightlaneError, wait_s: float = 0.0) -> WeightlaneError:
        """Put `error` at the next gate unless one is there, or comes within `wait_s`; returns the one that is."""
        store = self._store
        if store is None:
            return error

        def tell() -> WeightlaneError:
            if wait_s:
                with suppress(dist.DistStoreError):
                    store.wait([f"gate|{self._round}"], timedelta(seconds=wait_s))
            mine = json.dumps(error.to_wire())
            told = self._decide(mine)
            return error if told in (mine, _OPEN) else error_from_wire(json.loads(told))

        with suppress(WeightlaneError):  # the rank that has the store is gone: this error says so
            return self._bounded(tell, wait_s + _GRACE_S)
        return error

    def _bounded(self, action: Callable[[], _T], seconds: float) -> _T:
        """Run `action` with the store, whose requests have no deadline of their own. Raises typed errors."""
        deadline, peer = Deadline.after(seconds), "trainer rank 0"
        try:
            return call_bounded(action, self._life, deadline, _STORE, peer)
        except WeightlaneError:
            raise
        except RuntimeError as cause:
            raise translate(cause, self._life.part, deadline, _STORE, peer) from cause
