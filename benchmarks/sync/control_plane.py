"""Measures the control plane: sessions and versions of many participants, with an engine that moves nothing.

    python -m benchmarks.sync.control_plane [--participants 2 16 128 1280] [--tensors 8 2000] [--versions 9] [--sessions 3]

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
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command import Report, finish, options_of, say, table
from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

from .light_participants import LIMIT_S, Case, LightPublisher, LightReplica, take_part

PARTICIPANTS = (2, 16, 128, 1280)
TENSORS = (8, 2000)
PROCESSES = 4
"""How many processes share the participants but rank 0."""
MOST_VERSION_S, MOST_SESSION_S = 0.5, 10.0
"""Longest acceptable medians, in seconds, of a version and of a session.

They are set for the largest default case, 1,280 participants with 2,000 tensors, on two cores.
"""
_PART = "control plane benchmark"


@contextmanager
def _others(case: Case, address: Mapping[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    names = [*case.trainers[1:], *(name for group in case.replicas.values() for name in group)]
    shares = [share for n in range(PROCESSES) if (share := names[n::PROCESSES])]
    with ExitStack() as stack:
        started = []
        for share in shares:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.sync.control_plane", "--take-part"],
                cwd=Path(__file__).resolve().parents[2],
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
        deadline = Deadline.after(LIMIT_S)
        for process in started:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], deadline.remaining_s)[0]:
                raise deadline.error("a process of participants to join", part=_PART)
            if process.stdout.readline() != "joined\n":
                raise WeightlaneError("a process of participants has ended.", part=_PART)
        yield started


def measure(case: Case, versions: int, sessions: int) -> Report:
    """Sync `versions` versions and make `sessions` sessions of a case. Returns the table's row."""
    limits = SyncConfig(deadline_s=LIMIT_S, connect_timeout_s=LIMIT_S, rejoin_s=LIMIT_S, stall_s=LIMIT_S)
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
    "participants", "tensors", "version ms (p50)", "(most)", "messages", "kB", "session s (p50)", "messages", "MB", "threads",
    "descriptors",
)  # fmt: skip


def text(report: Report) -> str:
    """The table, in Markdown."""
    slow = f"TOO SLOW: a version may take {MOST_VERSION_S} s, a session {MOST_SESSION_S} s\n"
    return table(HEADER, map(cells, report["rows"])) + ("" if report["met"] else slow)


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
        return {"met": quick, "verified": True, "rows": rows}

    return finish("control-plane", measured, text, options.json)


if __name__ == "__main__":
    sys.exit(take_part() if "--take-part" in sys.argv else main())
