"""Participants of the control plane that say everything a publisher or subscriber says, and move nothing."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.ckpt_engines.channels.channel import Frame
from weightlane.sync import CommitReport, Manifest, Placement, TensorSpec
from weightlane.sync.control.messages import (
    Accepted,
    Connect,
    EngineTraits,
    Go,
    Kind,
    Message,
    Offer,
    Open,
    Sent,
    Staged,
)
from weightlane.sync.control.participant import Participant
from weightlane.sync.control.rendezvous import Mailbox
from weightlane.sync.plan.session_plan import SessionPlan, Supply
from weightlane.sync.send.rank_agreement import RankAgreement
from weightlane.sync.version.box import Box
from weightlane.sync.version.sliced_tensors import Slicing

RANKS_OF_A_REPLICA = 8
LIMIT_S = 120.0
"""Most that the participants may take to join, and any single message, session or version; far beyond what 1,280 need."""
_SAID = [[number, f"{number:016x}"] for number in range(4)]
"""Digests that each trainer rank tells the others for a version: as many as a check of 4 MiB of copies has."""


@dataclass(frozen=True)
class Case:
    """A size to measure: the number of participants, and of the model's tensors."""

    participants: int
    tensors: int

    @property
    def trainers(self) -> list[str]:
        """Names of the publishers, in rank order."""
        return [f"trainer-{rank}" for rank in range(max(1, self.participants // 5))]

    @property
    def replicas(self) -> dict[str, list[str]]:
        """The subscribers of every replica."""
        left = self.participants - len(self.trainers)
        names = [f"rollout-{n // RANKS_OF_A_REPLICA}/{n % RANKS_OF_A_REPLICA}" for n in range(left)]
        groups = [names[first : first + RANKS_OF_A_REPLICA] for first in range(0, left, RANKS_OF_A_REPLICA)]
        return {group[0].partition("/")[0]: group for group in groups}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The model's tensors, with names as long as real ones."""
        shape = (64 * RANKS_OF_A_REPLICA, 64)
        return tuple(
            TensorSpec(f"model.layers.{n // 8}.mlp.experts.{n % 8}.down_proj.weight", shape, torch.bfloat16)
            for n in range(self.tensors)
        )

    def needed(self, rank: int) -> Placement:
        """Return the slices that a rollout rank needs: its rows of every tensor."""
        rows = 64
        return Placement.of((spec, Box((rank * rows, 0), (rows, 64))) for spec in self.specs)


@cache
def _needed(case: Case, rank: int) -> tuple[str, Any]:
    needed = case.needed(rank)
    return needed.digest, needed.to_plain()


@cache
def _supply(case: Case) -> Any:
    shares = {case.trainers[0]: Placement.whole(case.specs)}
    return Supply(shares, 1 << 25, checksummed=True, quantised="none").to_plain()


@cache
def _manifest(case: Case) -> Manifest:
    layout = Manifest(0, case.specs, 1 << 25)
    return replace(layout, slicing=Slicing("a plan", case.specs, layout.regions))


class _Planned:
    """Fake of a session's plan, which says nothing of transfers."""

    digest = "the same for everybody"
    relays = False


class LightParticipant(Participant):
    """Follows the coordinator as any participant does, and moves nothing."""

    def __init__(self, name: str, address: Mapping[str, Any], case: Case) -> None:
        self.case = case
        super().__init__(name, address)
        self.start()

    def _connect_links(self, message: Connect, deadline: Deadline) -> SessionPlan:
        board = self.rendezvous.mailbox(f"plan/{message.session}")
        self._supplied(board, deadline)
        for key in set(message.needs.values()) - {""}:
            self._fetch(board, f"need/{key}", deadline)
        return _Planned()  # type: ignore[return-value]

    def _supplied(self, board: Mailbox, deadline: Deadline) -> None:
        self._fetch(board, "supply", deadline)

    def _fetch(self, board: Mailbox, key: str, deadline: Deadline) -> None:
        # Not parsed: a rank does that on its own host, for itself alone.
        value = board._owner.ask(Frame(Kind.GET, 0, board._name(key), b"")).result(deadline)
        assert value, "in time"

    def _close_links(self) -> None:
        pass

    def _free(self) -> None:
        pass

    def _aborted(self, version: int) -> None:
        pass

    def _committed(self, version: int) -> None:
        pass


class LightPublisher(LightParticipant):
    """Trainer rank that offers versions and sends nothing."""

    def __init__(self, rank: int, address: Mapping[str, Any], case: Case) -> None:
        self._rank, self._talk = rank, None
        super().__init__(case.trainers[rank], address, case)

    _talk: RankAgreement | None

    def _open_links(self) -> tuple[str, EngineTraits | None]:
        traits = EngineTraits(selective=True, elastic=False, persistent=False)
        return "", traits if self._rank == 0 else None

    def _supplied(self, board: Mailbox, deadline: Deadline) -> None:
        del deadline
        if self._rank == 0:
            board.put("supply", _supply(self.case))
        mailbox = self.rendezvous.mailbox(f"agreement/{self.session}")
        self._talk = RankAgreement(mailbox, self.case.trainers, self._rank)
        self.agree(0)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Go):
            self._tell(Sent(name=self.name, session=self.session, version=message.version, nbytes=0, seconds=0.0))
            self.agree(message.version + 1)

    def agree(self, version: int) -> None:
        """Tell the other trainer ranks the digests that this one has of a version."""
        assert self._talk is not None
        self._talk.publish("digests", (version, 1), _SAID)

    def publish(self, version: int) -> None:
        """[rank 0] Hear what all ranks say of a version, and offer it."""
        assert self._talk is not None
        if len(self.case.trainers) > 1:
            said = self._talk.collect("digests", (version, 1), Deadline.after(LIMIT_S))
            assert said == dict.fromkeys(self.case.trainers, _SAID)
        manifest = _manifest(self.case).as_version(version, "")
        self._tell(Offer(name=self.name, session=self.session, version=version, manifest=manifest.to_offer()))


class LightSubscriber(LightParticipant):
    """Rollout rank that accepts every version and reports it staged, without a byte."""

    def _open_links(self) -> tuple[str, EngineTraits | None]:
        rank = int(self.name.partition("/")[2])
        digest, plain = _needed(self.case, rank)
        self.rendezvous.mailbox(f"plan/{self.session}").put(f"need/{digest}", plain)
        return digest, None

    def _handle(self, message: Message) -> None:
        if isinstance(message, Open):
            manifest = _manifest(self.case).offered(message.manifest)
            said = {"name": self.name, "session": self.session, "version": manifest.version}
            self._tell(Accepted(**said))
            self._tell(Staged(**said, nbytes=0, seconds=0.0))


class LightReplica:
    """Replica whose commits take no time."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        self.name, self._names = name, tuple(names)

    def subscriber_names(self) -> Sequence[str]:
        """See `Replica.subscriber_names`."""
        return self._names

    async def commit(self, version: int) -> CommitReport:
        """See `Replica.commit`."""
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        """Nothing is to fail here: raises RuntimeError."""
        raise RuntimeError(f"version {version} of {self.name} was rolled back: the coordinator took it for failed")

    async def quarantine(self, error: WeightlaneError) -> None:
        """Nothing is to fail here: raises `error`."""
        raise error


def take_part() -> int:
    """Be the participants named on standard input, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; whoever started us decides
    told = json.loads(sys.stdin.readline())
    case, address = Case(*told["case"]), told["address"]
    ranks = {name: rank for rank, name in enumerate(case.trainers)}
    for rank in range(RANKS_OF_A_REPLICA):
        _needed(case, rank)
    gc.freeze()  # hundreds of participants make garbage here, and a model is looked through for it each time
    for name in told["names"]:
        _joined(name, ranks, address, case)
    print("joined", flush=True)
    sys.stdin.read()
    os._exit(0)  # a thousand threads need not be joined


_members: list[LightParticipant] = []


def _joined(name: str, ranks: Mapping[str, int], address: Mapping[str, Any], case: Case) -> None:
    _members.append(
        LightPublisher(ranks[name], address, case) if name in ranks else LightSubscriber(name, address, case)
    )
