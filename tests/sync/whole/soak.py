"""A soak: versions go to two replicas while faults strike at random; nothing hangs and no wrong weight is ever served.

    python tests/sync/whole/soak.py --engine shm --versions 200 --seed 0

Faults come from ``faulty:ENGINE`` inside the trainer and the rollout processes, from commits that fail, and from processes
that are killed and started anew. After every version each replica that may get requests must hold, bit for bit, the version
that the coordinator says it serves. Every injected fault must be accounted for by the report of the connection it struck.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import helper_paths  # noqa: F401 - it makes the others importable
from hop_run import Run, expected
from recorded_faults import faults_in

from weightlane.ckpt_engines import CheckpointEngineRegistry, QuarantinedError, SyncAbortedError, UntouchedError
from weightlane.ckpt_engines.faulty.faults import NO_BUCKET, FaultKind, FaultRecord
from weightlane.plugins import hookimpl, make_hooks
from weightlane.sync import ReplicaState

DEADLINE_S = 30.0
IMPATIENT = {"deadline_s": DEADLINE_S, "rejoin_s": 10.0, "stall_s": 0.5, "retries": 2}
"""Short is only what every injected hang and every bucket that is dropped costs."""


def harmless(engine: str) -> set[FaultKind]:
    """Return the fault kinds that `engine` absorbs without a failed attempt, unless something else is slow as well."""
    # A store that writes a bucket twice has it once.
    stores = CheckpointEngineRegistry().engine_class(engine).capabilities.persistent
    return {FaultKind.DELAY, FaultKind.DUPLICATE} if stores else {FaultKind.DELAY}


@dataclass
class Result:
    """Findings of a soak, and facts that the run reported through the hooks that any observer gets."""

    failed_sessions: set[str] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes of versions, counted over the replicas; `aborted` counts each aborted version once."""
    recovered: int = 0
    """Versions that were committed at a further attempt, or after one that was aborted."""
    engine_faults: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    unaccounted: list[FaultRecord] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @hookimpl
    def version_committed(self, facts: Mapping[str, Any]) -> None:
        self._note(facts["failures"])
        self.outcomes.update(part["outcome"] for part in facts["replicas"].values())

    @hookimpl
    def version_aborted(self, facts: Mapping[str, Any]) -> None:
        self._note(facts["failures"])
        self.outcomes["aborted"] += 1

    def _note(self, failures: list[dict[str, Any]]) -> None:
        self.failed_sessions.update(failure["session"] for failure in failures)

    def __str__(self) -> str:
        counts = {"engine faults": self.engine_faults, "outcomes per replica": self.outcomes}
        lines = [f"{what}: {', '.join(f'{key} {n}' for key, n in many.most_common())}" for what, many in counts.items()]
        lines.append(f"kill -9: {self.kills}; recovered versions: {self.recovered}")
        return "\n".join([*lines, f"wrong weights: {self.wrong}", f"faults nobody reported: {self.unaccounted}"])


def soak(
    engine: str, options: dict[str, Any], *, versions: int, seed: int, rate: float, log: Path, commit: str = "staged"
) -> Result:
    """Run it. `rate` is the probability of a fault per call of a half; `log` is where the faults are written."""
    chance = random.Random(seed)
    faulty = {"inner": options, "seed": seed, "rate": rate, "delay_s": 0.05, "log": str(log)}
    run = Run(f"faulty:{engine}", faulty)
    result = Result()
    run.begin(
        replicas=2,
        trainer={"deadline_s": DEADLINE_S},
        rollout={"commit": commit},
        sync=IMPATIENT,
        hooks=make_hooks([result]),
    )
    try:
        for version in range(1, versions + 1):
            _disturb(run, chance, result)
            _carry(run, version, result)
            _check(run, result)
    finally:
        run.end()
    faults = faults_in(log)
    result.engine_faults = Counter(fault.kind.value for fault in faults)
    absorbed = harmless(engine)
    result.unaccounted = [
        fault
        for fault in faults
        if fault.kind not in absorbed
        and not _gives_back(fault)
        and _whole_session(fault.session) not in result.failed_sessions
    ]
    return result


def _whole_session(session: str) -> str:
    """The coordinator's session that one of an engine, a link's or its own, belongs to."""
    return "-".join(session.split("-")[:2])


def _gives_back(fault: FaultRecord) -> bool:
    """Whether it struck while memory was given back: the sender takes other memory then, and no version suffers."""
    return fault.index == NO_BUCKET and fault.version != NO_BUCKET


def _disturb(run: Run, chance: random.Random, result: Result) -> None:
    draw = chance.random()
    if draw < 0.015:
        run.restart_trainer()
        result.kills += 1
    elif draw < 0.035:
        run.restart_replica(chance.randrange(2))
        result.kills += 1
    elif draw < 0.08:
        replica = run.replicas[chance.randrange(2)]
        replica.fails_with = QuarantinedError("a rank stopped half-way (injected).", part=replica.name)
    elif draw < 0.11:
        replica = run.replicas[chance.randrange(2)]
        replica.refuses_with = UntouchedError("a rank could not begin (injected).", part=replica.name)


def _carry(run: Run, version: int, result: Result) -> None:
    run.publish_next(version)
    with suppress(SyncAbortedError):
        report = run.sync(version)
        result.recovered += bool(report.failures or result.outcomes["aborted"])
        for replica in run.replicas:
            if report.replicas[replica.name].outcome.value == "committed":
                replica.serves = version


def _check(run: Run, result: Result) -> None:
    """Note every serving replica that does not hold exactly the version it is said to serve."""
    states = run.coordinator.states()
    for replica in run.replicas:
        if states[replica.name] is not ReplicaState.SERVING:
            continue
        for rank in replica.ranks.values():
            if rank.call("live_digest") != expected(replica.serves):
                result.wrong.append(f"{replica.name} does not hold version {replica.serves}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="shm")
    parser.add_argument("--options", default="{}", type=json.loads, help="JSON")
    parser.add_argument("--versions", default=200, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--commit", default="staged", choices=["staged", "in_place"])
    parser.add_argument("--rate", default=0.03, type=float, help="probability of a fault per bucket and half")
    given = vars(parser.parse_args())
    engine = given.pop("engine")
    with tempfile.TemporaryDirectory() as directory:
        options = given.pop("options") or ({"path": directory} if engine == "filesystem" else {})
        result = soak(engine, options, log=Path(directory) / "faults.jsonl", **given)
    print(result)
    return 1 if result.wrong or result.unaccounted else 0


if __name__ == "__main__":
    sys.exit(main())
