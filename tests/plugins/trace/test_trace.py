"""The trace: valid whatever happened to its processes, every span where and when it was, and never larger than allowed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_format import load
from waiting import MovableClock

from weightlane.plugins import RunHooks, make_hooks
from weightlane.plugins.trace.merge import claim, merge
from weightlane.plugins.trace.observer import TraceObserver
from weightlane.plugins.trace.part import FULL, parts_dir


def traced(path: Path, limit_mib: float = 1.0) -> RunHooks:
    return make_hooks([TraceObserver(path, limit_mib)])


def facts(seconds: float, participant: str = "trainer-0") -> dict[str, object]:
    return {"seconds": seconds, "nbytes": 8, "participant": participant}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> MovableClock:
    """The wall clock of the trace."""
    now = MovableClock()
    for module in ("observer", "part"):
        monkeypatch.setattr(f"weightlane.plugins.trace.{module}.now_us", lambda: round(1e6 * now()))
    return now


def test_every_hook_leaves_its_mark_in_the_row_of_its_participant(path: Path, clock: MovableClock) -> None:
    """The trace is of a small run: one version committed, one aborted, one step."""
    hooks = traced(path)
    hooks.run_started(facts={"step": 0, "steps": 3})
    clock.advance(0.01)
    hooks.version_opened(version=1, facts={})
    clock.advance(0.01)
    hooks.snapshot_taken(version=1, facts=facts(0.001))
    for index in range(3):
        clock.advance(0.002)
        hooks.bucket_sent(version=1, index=index, facts=facts(0.002))
        hooks.bucket_received(version=1, index=index, facts=facts(0.0015, "rollout-0/0"))
    hooks.version_staged(version=1, facts=facts(0.006, "rollout-0/0"))
    commit = {"seconds": 0.005, "waited_s": 0.001, "blocked_s": 0.003, "load_s": 0.001, "in_flight": 2}
    hooks.replica_committed(replica="rollout-0", version=1, facts=commit)
    committed = {"seconds": 0.016, "latency_s": 0.1, "sent_bytes": 24, "replicas": {}}
    hooks.version_committed(version=1, facts=committed)
    for version, tokens in enumerate((5, 7)):
        request = {"replica": "rollout-0", "request": "r", "tokens": tokens, "seconds": 0.02, "finish_reason": "stop"}
        hooks.generation_finished(facts={**request, "version_min": version, "version_max": 1})
    step = {"seconds": 0.008, "forward_backward_s": 0.005, "fence_s": 0.001, "optimizer_s": 0.002}
    hooks.rank_stepped(rank=0, step=1, facts={**step, "participant": "trainer-0", "role": "critic"})
    hooks.training_step(
        step=1, facts={"seconds": 0.008, "waited_for_rollouts_s": 0.003, "reward": 0.5, "tokens_per_s": 9.0}
    )
    clock.advance(0.001)
    hooks.evaluated(step=1, facts={"accuracy": 0.5, "tasks": 8, "seconds": 0.001})
    hooks.version_opened(version=2, facts={})
    hooks.version_aborted(version=2, facts={"error": "a reason", "seconds": 0.001})
    hooks.replica_quarantined(replica="rollout-0", facts={"version": 2, "error": "a reason"})
    hooks.run_ended(facts={"error": "a reason"})
    assert hooks.reports == ()
    merged = merge(path)
    assert (merged.path, merged.processes, merged.incomplete) == (path, 1, ())
    assert not parts_dir(path).exists()
    trace = load(path)
    assert merged.events == len([event for event in trace.events if event["ph"] != "M"])
    process = "driver, trainer-0, rollout-0/0, rollout-0"
    assert list(trace.processes.values()) == [process]
    version, aborted = trace.spans(process, "versions")
    assert (version.name, aborted.name, aborted.args["error"]) == ("version 1", "version 2 aborted", "a reason")
    buckets = [*trace.spans(process, "trainer-0 send"), *trace.spans(process, "rollout-0/0 receive")]
    assert [bucket.name for bucket in buckets] == ["bucket 0", "bucket 1", "bucket 2"] * 2
    for bucket in buckets:
        assert version.start <= bucket.start <= bucket.end <= version.end
        assert bucket.args["version"] == 1
    parent, *children = trace.spans(process, "trainer-0 training")
    lengths = [(child.name, child.end - child.start) for child in children]
    assert lengths == [("forward, backward", 5000), ("fence", 1000), ("optimizer", 2000)]
    assert (parent.name, parent.start, parent.end) == ("critic: step 1", children[0].start, children[-1].end)
    assert [span.name for span in trace.spans(process, "training")] == [
        "wait for rollouts",
        "step 1",
        "evaluation at step 1",
    ]
    assert [span.end - span.start for span in trace.spans(process, "rollout-0 commit")] == [3000]
    assert {span.name for span in trace.spans(process, "rollout-0 generation")} == {"5 tokens", "7 tokens"}
    assert trace.named("i") == ["run started", "rollout-0 quarantined", "run ended"]
    assert trace.named("C") == ["reward", "tokens per second"]
    assert trace.other["started_unix_s"] == 1000.0


@given(st.lists(st.tuples(st.floats(0, 0.02), st.floats(0, 0.001)), min_size=1, max_size=12))
def test_spans_of_any_lengths_that_overlap_in_any_way_stand_in_rows_that_nest(
    tmp_path_factory: pytest.TempPathFactory, clock: MovableClock, spans: list[tuple[float, float]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    hooks = traced(path)
    for seconds, pause_s in spans:
        clock.advance(pause_s)
        request = {"replica": "rollout-0", "tokens": 1, "seconds": seconds}
        hooks.generation_finished(facts=request)
        hooks.bucket_sent(version=1, index=0, facts=facts(seconds))
    merge(path)
    trace = load(path)  # which checks the nesting
    assert len(trace.named("X")) == 2 * len(spans)


def test_what_a_killed_process_had_written_stays_but_for_its_last_half_line(path: Path) -> None:
    assert claim(path) == path
    traced(path).snapshot_taken(version=1, facts=facts(0.001))
    (part,) = parts_dir(path).glob("*.jsonl")
    with part.open("a") as file:
        file.write('{"ph": "X", "name": "bucket')
    second = claim(path)  # of the next run, which merges what the killed one left
    assert second == path.with_name("trace-2.json")
    assert load(path).named("X") == ["snapshot v1"]
    traced(second).snapshot_taken(version=2, facts=facts(0.0))
    merge(second)
    assert load(second).named("X") == ["snapshot v2"]


def test_a_part_at_its_limit_says_so_and_stays_below(path: Path) -> None:
    limit = 20_000
    hooks = traced(path, limit / 2**20)
    for index in range(1000):
        hooks.bucket_sent(version=1, index=index, facts=facts(0.0))
    (part,) = parts_dir(path).glob("*.jsonl")
    assert part.stat().st_size <= limit + 200, "the mark itself comes on top"
    merged = merge(path)
    assert merged is not None
    assert merged.incomplete == ("trainer-0",)
    assert load(path).named("i") == [FULL]
    assert hooks.reports == ()


def test_numbers_that_json_has_no_word_for_are_written_out(path: Path) -> None:
    hooks = traced(path)
    hooks.training_step(
        step=1,
        facts={"seconds": 0.1, "grad_norm": math.nan, "reward": math.inf, "staleness_mean": 0.5, "path": Path("x")},
    )
    merge(path)
    trace = load(path)
    (step,) = trace.spans("driver", "training")
    assert (step.args["grad_norm"], step.args["reward"], step.args["path"]) == ("nan", "inf", "x")
    assert trace.named("C") == ["staleness (versions)"]
