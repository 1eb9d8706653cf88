"""Measures the control plane: sessions and versions of many participants, with an engine that moves nothing.

    python -m benchmarks.control_plane [--participants 2 16 128 1280] [--tensors 8 2000] [--versions 9] [--sessions 3] [--json X]

A fifth of the participants are trainer ranks, the others rollout ranks, eight to a replica. Each has a connection and a control
thread of its own and says everything that a `Publisher` or a `Subscriber` says; nobody snapshots, plans or moves anything. Rank 0
is in the process of the coordinator, as in a training script; the others share a few processes, since a thousand do not fit on
one machine. *version* is the time from `publish` to the end of `Coordinator.sync`, *session* that of a connection of all
participants whose connection before it was given up. Messages and bytes are those that the coordinator's process handles.

The processes share the machine's cores: of a thousand participants on two cores most of the time is theirs, which they would
spend side by side on hosts of their own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, Topology, WeightlaneError
from weightlane.cli.bench.report.machine import this_machine
from weightlane.sync import CommitReport, Coordinator, Manifest, Placement, Rendezvous, SyncConfig, TensorSpec
from weightlane.sync.control.hub.frames import Frame, Kind
from weightlane.sync.control.mailbox import Mailbox
from weightlane.sync.control.messages import Accepted, Connect, EngineTraits, Go, Message, Offer, Open, Sent, Staged
from weightlane.sync.control.participant import Participant
from weightlane.sync.control.tensor_lists import TensorLists, scope_of
from weightlane.sync.plan.session_plan import SessionPlan
from weightlane.sync.plan.supply import Supply
from weightlane.sync.send.agreement.rank_agreement import Interrupt, RankAgreement
from weightlane.sync.version.box import Box

from .command import Report, finish, options_of, say

PARTICIPANTS = (2, 16, 128, 1280)
TENSORS = (8, 2000)
RANKS_OF_A_REPLICA = 8
PROCESSES = 4
"""How many processes share the participants but rank 0."""
MOST_VERSION_S, MOST_SESSION_S = 0.5, 10.0
"""What 1,280 participants with 2,000 tensors may take on two cores."""
_LIMIT_S = 120.0
"""Most that the participants may take to join, and any single message, session or version; far beyond what 1,280 need."""
_PART = "control plane benchmark"
_SAID = [[number, f"{number:016x}"] for number in range(4)]
"""What a trainer rank says of a version to the others: as many digests as a check of 4 MiB of copies has."""


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
        """What a rollout rank needs: its rows of every tensor."""
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
    return Manifest(0, case.specs, 1 << 25)


_lists = TensorLists()
"""One for all rollout ranks of a process: two cores cannot parse for a thousand. So is the newest manifest."""
_newest: list[Manifest | None] = [None]


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

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> SessionPlan | None:
        del topology
        board = self.rendezvous.mailbox(f"plan/{message.session}")
        self._supplied(board, deadline)
        for key in set(message.needs.values()) - {""}:
            self._fetch(board, f"need/{key}", deadline)
        return _Planned()  # type: ignore[return-value]

    def _supplied(self, board: Mailbox, deadline: Deadline) -> None:
        self._fetch(board, "supply", deadline)

    def _fetch(self, board: Mailbox, key: str, deadline: Deadline) -> None:
        # Not parsed: a rank does that on its own host, for itself alone.
        value = board._client.ask(Frame(Kind.GET, 0, board._name(key), b"")).result(deadline)
        assert value, "in time"

    def _close_half(self) -> None:
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

    _lists = TensorLists()

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        traits = EngineTraits(selective=True, elastic=False, persistent=False)
        return {}, traits if self._rank == 0 else None

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
        self._talk.say("digests", version, _SAID)

    def publish(self, version: int) -> None:
        """[rank 0] Hear what all ranks say of a version, and offer it."""
        assert self._talk is not None
        if len(self.case.trainers) > 1:
            said = self._talk.hear("digests", version, Deadline.after(_LIMIT_S), Interrupt())
            assert said == dict.fromkeys(self.case.trainers, _SAID)
        manifest = _manifest(self.case).as_version(version, "")
        board = self.rendezvous.mailbox(scope_of(self.session))
        plain = self._lists.referred_to(manifest.to_plain(), board, self.session)
        self._tell(Offer(name=self.name, session=self.session, version=version, manifest=plain))


class LightSubscriber(LightParticipant):
    """Rollout rank that accepts every version and reports it staged, without a byte."""

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        return {}, None

    def _said_need(self) -> str:
        rank = int(self.name.partition("/")[2])
        digest, plain = _needed(self.case, rank)
        self.rendezvous.mailbox(f"plan/{self.session}").put(f"need/{digest}", plain)
        return digest

    def _handle(self, message: Message) -> None:
        if isinstance(message, Open):
            board = self.rendezvous.mailbox(scope_of(self.session))
            plain = _lists.looked_up(message.manifest, board, Deadline.after(_LIMIT_S))
            manifest = _newest[0] = Manifest.from_plain(plain, *_newest)
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


@contextmanager
def _others(case: Case, address: Mapping[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    names = [*case.trainers[1:], *(name for group in case.replicas.values() for name in group)]
    shares = [share for n in range(PROCESSES) if (share := names[n::PROCESSES])]
    with ExitStack() as stack:
        started = []
        for share in shares:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control_plane", "--take-part"],
                cwd=Path(__file__).resolve().parents[1],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)  # closes its pipes, and waits for it
            stack.callback(process.kill)
            started.append(process)
            assert process.stdin is not None
            print(
                json.dumps({"case": [case.participants, case.tensors], "address": dict(address), "names": share}),
                file=process.stdin,
                flush=True,
            )
        deadline = Deadline.after(_LIMIT_S)
        for process in started:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], deadline.remaining_s)[0]:
                raise deadline.error("a process of participants to join", part=_PART)
            if process.stdout.readline() != "joined\n":
                raise WeightlaneError("a process of participants has ended.", part=_PART)
        yield started


def measure(case: Case, versions: int, sessions: int) -> Report:
    """Sync `versions` versions and make `sessions` sessions of a case. Returns the table's row."""
    limits = SyncConfig(deadline_s=_LIMIT_S, connect_timeout_s=_LIMIT_S, rejoin_s=_LIMIT_S, stall_s=_LIMIT_S)
    rendezvous = Rendezvous.host()
    address = rendezvous.address.to_plain()
    replicas = [LightReplica(name, names) for name, names in case.replicas.items()]
    coordinator = Coordinator(rendezvous, case.trainers, replicas, limits)
    leader = LightPublisher(0, address, case)
    version_s: list[float] = []
    session_s: list[float] = []
    session_traffic: list[tuple[int, int]] = []
    version_traffic: list[tuple[int, int]] = []
    with coordinator, leader, _others(case, address) as processes, asyncio.Runner() as runner:
        runner.run(coordinator.connect())
        for _ in range(sessions):
            coordinator._session.abandon()
            before, began = rendezvous.traffic, time.perf_counter()
            runner.run(coordinator.connect())
            session_s.append(time.perf_counter() - began)
            session_traffic.append(_difference(before, rendezvous.traffic))
        for process in processes:
            assert process.poll() is None
        for version in range(versions + 1):
            before, began = rendezvous.traffic, time.perf_counter()
            leader.publish(version)
            report = runner.run(coordinator.sync(version))
            assert len(report.replicas) == len(replicas)
            if version == 0:  # the first one warms up
                continue
            version_s.append(time.perf_counter() - began)
            version_traffic.append(_difference(before, rendezvous.traffic))
        threads = [_status(process.pid) for process in processes]
    return {
        "participants": case.participants,
        "tensors": case.tensors,
        "version_s": version_s,
        "session_s": session_s,
        "version_messages": statistics.median(messages for messages, _ in version_traffic),
        "version_bytes": statistics.median(nbytes for _, nbytes in version_traffic),
        "session_messages": statistics.median(messages for messages, _ in session_traffic),
        "session_bytes": statistics.median(nbytes for _, nbytes in session_traffic),
        "most_threads": max(count for count, _ in threads),
        "most_descriptors": max(count for _, count in threads),
    }


def _difference(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


def _status(pid: int) -> tuple[int, int]:
    """Threads and open descriptors of a process."""
    here = Path(f"/proc/{pid}")
    return len(list((here / "task").iterdir())), len(list((here / "fd").iterdir()))


def cells(row: Report) -> list[str]:
    """A row of the table as text, cell by cell."""
    middle = statistics.median
    return [
        f"{row['participants']:,}",
        f"{row['tensors']:,}",
        f"{1000 * middle(row['version_s']):.1f}",
        f"{1000 * max(row['version_s']):.1f}",
        f"{row['version_messages']:,.0f}",
        f"{row['version_bytes'] / 1000:,.0f}",
        f"{middle(row['session_s']):.3f}",
        f"{row['session_messages']:,.0f}",
        f"{row['session_bytes'] / 1e6:,.1f}",
        f"{row['most_threads']:,}",
        f"{row['most_descriptors']:,}",
    ]


HEADER = (
    "participants",
    "tensors",
    "version ms (p50)",
    "(most)",
    "messages",
    "kB",
    "session s (p50)",
    "messages",
    "MB",
    "threads",
    "descriptors",
)


def text(report: Report) -> str:
    """The table, in Markdown."""
    lines = [" | ".join(HEADER), " | ".join("---:" for _ in HEADER)]
    lines += [" | ".join(cells(row)) for row in report["rows"]]
    if not report["verified"]:
        lines.append(f"TOO SLOW: a version may take {MOST_VERSION_S} s, a session {MOST_SESSION_S} s")
    return "\n".join(f"| {line} |" if "|" in line else line for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is 1 when it took too long."""
    parser = options_of(__doc__)
    parser.add_argument("--participants", type=int, nargs="+", default=list(PARTICIPANTS))
    parser.add_argument("--tensors", type=int, nargs="+", default=list(TENSORS))
    parser.add_argument("--versions", type=int, default=9)
    parser.add_argument("--sessions", type=int, default=3)
    options = parser.parse_args(arguments)

    def measured() -> Report:
        rows = []
        for participants in options.participants:
            for tensors in options.tensors:
                say(f"{participants} participants, {tensors} tensors")
                rows.append(measure(Case(participants, tensors), options.versions, options.sessions))
        quick = all(
            statistics.median(row["version_s"]) <= MOST_VERSION_S
            and statistics.median(row["session_s"]) <= MOST_SESSION_S
            for row in rows
        )
        return {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": this_machine().model_dump(),
            "verified": quick,
            "rows": rows,
        }

    return finish("control_plane", measured, text, options.json)


if __name__ == "__main__":
    sys.exit(take_part() if "--take-part" in sys.argv else main())
