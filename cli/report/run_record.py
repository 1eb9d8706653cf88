"""`read_record`: the data of the page about a run or a service, read from its directory, representable as JSON."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, StorageError
from weightlane.plugins.curves import is_measure, measure_name
from weightlane.trainer.loop.sampling.tally import described_samples
from weightlane.trainer.runner.file_observers import read_metrics
from weightlane.trainer.service.records.store import DATABASE

from ..config.toml_file import read_toml

Event = Mapping[str, Any]
_CURVE_POINTS = 1000
"""Most points of a curve. If there are more steps, means of neighbouring steps are drawn."""
_SPANS = 400
"""Most versions in the time line."""
_ROWS = 200
"""Most rows of each table."""
_SAMPLES = 10_000
_TAIL_BYTES = 1 << 18
"""Bytes at the end of a file of failures, and of the samples of a run that goes on, that are read."""
_SAMPLE_BYTES = 1 << 22
"""The same for the samples of a page that is written once."""
_REPLICA_EVENTS = ("replica_quarantined", "replica_lost", "replica_joined", "replica_left")
_DATABASE_S = 5.0
"""Longest wait for a lock of the service's database."""
_MODELS = """
SELECT models.id, models.client, models.state, models.created, models.used,
    CASE json_type(models.about, '$.config') WHEN 'null' THEN 'all weights'
        ELSE json_extract(models.about, '$.config.rank') END AS rank,
    (SELECT COUNT(*) FROM requests WHERE owner = models.id AND kind = 'optim_step' AND state = 'done') AS steps,
    (SELECT COUNT(*) FROM requests WHERE owner = models.id AND state = 'queued') AS queued,
    (SELECT COUNT(*) FROM checkpoints WHERE model = models.id) AS checkpoints
FROM models ORDER BY models.used DESC LIMIT ?
"""
_QUEUES = """
SELECT kind, SUM(state = 'queued') AS queued, SUM(state = 'done') AS done, SUM(state = 'failed') AS failed,
    MIN(CASE WHEN state = 'queued' THEN created END) AS oldest_queued, AVG(finished - created) AS mean_s
FROM requests GROUP BY kind ORDER BY kind LIMIT ?
"""
_SAMPLERS = """
SELECT id, client, COALESCE(checkpoint, model, '') AS weights, inflight, created, clients FROM samplers
ORDER BY created DESC LIMIT ?
"""


def read_record(run: Path, *, sample_bytes: int = _SAMPLE_BYTES) -> dict[str, Any]:
    """Read the run or the service in `run`, while it runs or afterwards.

    Of the file with samples the last `sample_bytes` are read. Times are Unix times and durations, in seconds. ``steps`` are
    thinned to `_CURVE_POINTS`, tables to their last rows. Raises `ConfigError` when `run` is not the directory of a run, and
    `StorageError` when its files cannot be read.
    """
    is_service = (run / DATABASE).is_file()
    if not is_service and not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run} is not the directory of a run: it has neither metrics.jsonl nor {DATABASE}.",
            part="report",
            hint="Name the run.dir of a configuration; a run writes its first event when its replicas serve.",
        )
    events = read_metrics(run / "metrics.jsonl")
    of = {
        kind: [each for each in events if each["event"] == kind]
        for kind in ("run_started", "training_step", "evaluated", "version_committed", "version_aborted", "run_ended")
    }
    steps, syncs = of["training_step"], _syncs([*of["version_committed"], *of["version_aborted"]])
    return {
        "name": run.resolve().name,
        "read": time.time(),
        "status": _status(of["run_started"], of["run_ended"], steps, is_service=is_service),
        "figures": _figures(events, steps, of["version_committed"], of["evaluated"]),
        "steps": [_numbers(each) for each in thinned(steps, _CURVE_POINTS)],
        "evaluations": [_numbers(each) for each in of["evaluated"]],
        "stalls": _stalls(steps, of["version_committed"]),
        "time_line": _time_line(steps, of["version_committed"]),
        "syncs": syncs[-_ROWS:],
        "aborted": [each for each in syncs if each["outcome"] != "committed"][-_ROWS:],
        "events": [_replica_event(each) for each in events if each["event"] in _REPLICA_EVENTS][-_ROWS:],
        "drawn": _drawn(of["run_ended"]),
        "failures": _last_lines(run / "failures.jsonl", _ROWS, _TAIL_BYTES),
        "samples": _last_lines(run / "samples.jsonl", _SAMPLES, sample_bytes),
        "settings": _settings(run / "config.toml"),
        "service": _service(run / DATABASE) if is_service else None,
    }


def read_live(run: Path) -> dict[str, Any]:
    """The record of a run for a page that asks for it again and again, with fewer samples."""
    return {**read_record(run, sample_bytes=_TAIL_BYTES), "live": True}


def read_comparison(runs: Sequence[Path], *, live: bool = False) -> dict[str, Any]:
    """Read several runs to compare them: ``runs``, their records without samples, each under a name of its own.

    ``differences`` are the settings that are not the same in all of them: ``name``, and ``values`` in the order of the runs.
    """
    records = [read_record(run, sample_bytes=0) for run in runs]
    names = [record["name"] for record in records]
    for record, run in zip(records, runs, strict=True):
        del record["read"]
        if names.count(record["name"]) > 1:
            record["name"] = str(run)
        times = [each["time"] for each in (*record["evaluations"], *record["steps"])]
        record["began"] = min(times, default=0.0)
    keys = dict.fromkeys(key for record in records for key in record["settings"])
    differences = [
        {"name": key, "values": values}
        for key in keys
        if len(set(values := [record["settings"].get(key, "") for record in records])) > 1
    ]
    return {
        "name": ", ".join(record["name"] for record in records),
        "read": time.time(),
        "live": live,
        "runs": records,
        "differences": differences,
    }


def thinned(events: Sequence[Event], most: int) -> list[Event]:
    """Reduce `events` to at most `most`: means of neighbours' numbers, but maxima of ``step`` and of names in ``_max``."""
    size = -(-len(events) // most)
    if size <= 1:
        return list(events)
    means: list[Event] = []
    for start in range(0, len(events), size):
        group = events[start : start + size]
        names = {name for each in group for name, value in each.items() if _is_number(value)}
        mean: dict[str, Any] = {}
        for name in names:
            values = [each[name] for each in group if _is_number(each.get(name))]
            mean[name] = max(values) if name.endswith("_max") or name == "step" else sum(values) / len(values)
        means.append(mean)
    return means


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(event: Event) -> dict[str, float]:
    """The finite numbers of an event. A loss may have become infinite, which JSON cannot represent."""
    return {name: value for name, value in event.items() if _is_number(value) and abs(value) < float("inf")}


def _status(begun: Sequence[Event], ended: Sequence[Event], steps: Sequence[Event], *, is_service: bool) -> str:
    if is_service:
        return "service"
    if ended and (not begun or ended[-1]["time"] >= begun[-1]["time"]):
        return f"failed: {ended[-1]['error']}" if "error" in ended[-1] else "ended"
    at = f" at step {steps[-1]['step']}" if steps else ""
    return f"not ended{at}" + (f" of {begun[-1]['steps']}" if begun and "steps" in begun[-1] else "")


def _figures(
    events: Sequence[Event], steps: Sequence[Event], commits: Sequence[Event], evaluations: Sequence[Event]
) -> list[dict[str, Any]]:
    """The figures at the top: a name, a value, and its unit or ``share``."""
    found: list[dict[str, Any]] = []

    def add(name: str, value: float | None, unit: str = "") -> None:
        if value is not None and abs(value) < float("inf"):
            found.append({"name": name, "value": value, "unit": unit})

    last: Event = steps[-1] if steps else {}
    add("optimizer steps", last.get("step"))
    for key in dict.fromkeys(key for each in evaluations for key in each if is_measure(key)):
        values = [each[key] for each in evaluations if _is_number(each.get(key))]
        add(f"held-out {measure_name(key)}, first", values[0] if values else None)
        add(f"held-out {measure_name(key)}, last", values[-1] if len(values) > 1 else None)
    add("reward of the last step", last.get("reward"))
    add("tokens a second", last.get("tokens_per_s"))
    if commits:
        add("versions committed", len(commits))
        add("versions aborted", sum(each["event"] == "version_aborted" for each in events))
    if groups := _sum(steps, "groups_drawn"):
        add("groups without signal", _sum(steps, "groups_without_signal") / groups, "share")
        add("groups replaced", _sum(steps, "groups_refilled"))
    waited, trained = _sum(steps, "waited_for_rollouts_s"), _sum(steps, "seconds")
    if steps and commits and waited + trained > 0:
        wall = steps[-1]["time"] - steps[0]["time"] + steps[0].get("seconds", 0.0)
        add("trainer idle", waited / (waited + trained), "share")
        add("trainer blocked by syncs", _sum(steps, "trainer_blocked_s") / (waited + trained), "share")
        add("rollouts blocked by syncs", min(1.0, _sum(steps, "rollout_blocked_s") / max(wall, 1e-9)), "share")
        add("both busy at once", last.get("overlap_share"), "share")
    return found


def _sum(events: Sequence[Event], name: str) -> float:
    return sum(float(each[name]) for each in events if _is_number(each.get(name)))


def _drawn(ended: Sequence[Event]) -> list[dict[str, str]]:
    """Sentences about drawn and trained samples, each with its subject; empty until the run has ended."""
    samples = ended[-1].get("samples", {}) if ended else {}
    return [{"subject": subject, "sentence": said} for subject, said in described_samples(samples).items()]


def _stalls(steps: Sequence[Event], commits: Sequence[Event]) -> dict[str, float] | None:
    """Seconds per step that versions kept each side from working, and those that synchronous updates would cost."""
    if not steps or not commits:
        return None
    blocking = next(
        (each["synchronous_update_s"] for each in reversed(steps) if _is_number(each.get("synchronous_update_s"))), None
    )
    stalls = {
        "trainer": _sum(steps, "trainer_blocked_s") / len(steps),
        "rollouts": _sum(steps, "rollout_blocked_s") / len(steps),
    }
    return stalls if blocking is None else {**stalls, "blocking": blocking}


def _time_line(steps: Sequence[Event], commits: Sequence[Event]) -> list[dict[str, Any]]:
    """Spans of the newest versions: ``lane``, ``kind``, ``version``, ``start`` and ``end``."""
    spans: list[dict[str, Any]] = []

    def add(lane: str, kind: str, version: int, start: float, end: float) -> None:
        spans.append({"lane": lane, "kind": kind, "version": version, "start": start, "end": end})

    for each in steps[-_SPANS:]:
        end, number = each["time"], each["step"]
        start = end - each.get("seconds", 0.0)
        add("trainer", "trains", number, start, end)
        if waited := each.get("waited_for_rollouts_s", 0.0):
            add("trainer", "waits for samples", number, start - waited, start)
    shown = list(commits[-_SPANS:])
    for each, following in zip_longest(shown, shown[1:]):
        version, end = each["version"], each["time"]
        add("sync", "syncs", version, end - each.get("latency_s", 0.0), end)
        add("generation", "blocked by the commit", version, end - each.get("rollout_blocked_s", 0.0), end)
        served_until = max(end, steps[-1]["time"] if steps else end)
        if following is not None:
            served_until = max(end, following["time"] - following.get("rollout_blocked_s", 0.0))
        add("generation", f"serves {'odd' if version % 2 else 'even'} versions", version, end, served_until)
    return spans


def _syncs(events: Sequence[Event]) -> list[dict[str, Any]]:
    """A row for each version, oldest first."""
    return [
        {
            "version": each.get("version"),
            "time": each["time"],
            "outcome": each["event"].removeprefix("version_"),
            "latency_s": each.get("latency_s", each.get("seconds")),
            **{
                key: each.get(key)
                for key in ("export_s", "transfer_s", "install_s", "rollout_blocked_s", "recomputed_tokens")
            },
            "sent_bytes": each.get("sent_bytes"),
            "replicas": len(each.get("replicas", ())),
            "retries": len(each.get("failures", ())),
            "error": str(each.get("error", "")),
        }
        for each in sorted(events, key=lambda each: float(each["time"]))
    ]


def _replica_event(event: Event) -> dict[str, Any]:
    place = f"in the place of {event['instead_of']}, " if event.get("instead_of") else ""
    joined = f"{place}with version {event.get('version')}"
    left = f"the run was scaled; {event.get('replicas')} left"
    detail = event.get("error") or (left if event["event"] == "replica_left" else joined)
    return {
        "time": event["time"],
        "replica": event.get("replica"),
        "event": event["event"].removeprefix("replica_"),
        "detail": str(detail),
    }


def _settings(path: Path) -> dict[str, str]:
    """The settings of a run by their full names, as TOML's values; empty without the file, as for a run of an older version."""
    found: dict[str, str] = {}

    def add(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                add(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = json.dumps(value, default=str)

    if path.is_file():
        add("", read_toml(path))
    return found


def _last_lines(path: Path, most: int, tail_bytes: int) -> list[dict[str, Any]]:
    """The last objects of a JSON Lines file; empty if there is no such file."""
    found: list[dict[str, Any]] = []
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        for line in file.read().decode(errors="replace").splitlines()[-most - 1 :]:
            with suppress(ValueError):
                each = json.loads(line)
                if isinstance(each, dict):
                    found.append(each)
    return found[-most:]


def _service(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The models, queues and samplers in the database of a service, which may be running. Raises `StorageError`."""
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_DATABASE_S)) as database:
            for name, query in (("models", _MODELS), ("queues", _QUEUES), ("samplers", _SAMPLERS)):
                cursor = database.execute(query, [_ROWS])
                columns = [column[0] for column in cursor.description]
                found[name] = [dict(zip(columns, row, strict=True)) for row in cursor]
    except sqlite3.Error as cause:
        raise StorageError(
            f"{path} cannot be read: {cause}.", part="report", hint="Is it the database of this weightlane's service?"
        ) from cause
    return found
