"""A whole run with every observer: one time line of all its processes, TensorBoard's curves, a live endpoint, a bad plugin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from event_files import scalars_and_texts
from run_process import FinishedRun, events_of
from trace_format import Span, Trace, load

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

STEPS = 4
SLACK_US = 1_000_000
"""Hooks are called after their event has ended, and a loaded machine may let one of two processes wait before it calls them.

`test_trace` shows with a clock of its own that spans have their exact places and lengths.
"""


def test_a_run_is_seen_on_one_time_line_in_tensorboard_and_by_prometheus_and_a_plugin_that_raises_does_not_end_it(
    finished_run: FinishedRun,
) -> None:
    run_dir, samples = finished_run.run_dir, finished_run.samples
    assert samples["weightlane_training_step"] >= 1
    assert samples["weightlane_versions_committed_total"] >= 1
    assert samples["weightlane_sync_latency_seconds_sum"] > 0
    assert samples["weightlane_trained_tokens_total"] > 0
    assert isinstance(finished_run.scraped_again, ConnectionRefusedError)
    said = "plugin raising (wl_raising_plugin 1.0) was disabled: rank_stepped raised OSError: no room at [step 1]"
    assert finished_run.out.count(said) == 1, "once, though both trainer ranks have it"
    assert "Traceback" in (run_dir / "logs" / "plugins.log").read_text()
    commits = [event["version"] for event in events_of(run_dir, "version_committed")][: STEPS + 1]
    check_curves(run_dir / "board", commits)
    assert f"events: {run_dir}/trace.json" in finished_run.out
    assert not (run_dir / "trace.json.parts").exists()
    check_trace(load(run_dir / "trace.json"), commits)


def check_curves(board: Path, versions: Sequence[int]) -> None:
    curves, texts = scalars_and_texts(board)
    assert list(curves["train/reward"]) == list(range(1, STEPS + 1))
    assert set(curves["sync/latency_s"]) == set(versions)
    assert set(curves["sync/rollout-0/blocked_s"]) == set(versions)
    assert set(curves["eval/accuracy"]) == {0, STEPS}
    assert texts == {}


def check_trace(trace: Trace, versions: list[int]) -> None:
    assert list(trace.processes.values()) == ["driver", "trainer-0", "trainer-1", "rollout-0", "rollout-0/0"]
    steps = [span.name for span in trace.spans("driver", "training") if span.name.startswith("step")]
    assert steps == [f"step {step}" for step in range(1, STEPS + 1)]
    spans = trace.spans("driver", "versions")
    assert [span.name for span in spans] == [f"version {version}" for version in versions]
    of_version = dict(zip(versions, spans, strict=True))
    by_rank = [trace.spans(f"trainer-{rank}", "send") for rank in (0, 1)]
    sent, received = [bucket for buckets in by_rank for bucket in buckets], trace.spans("rollout-0/0", "receive")
    for buckets in by_rank:
        assert sorted({bucket.args["version"] for bucket in buckets}) == versions
        assert len(buckets) > len(versions), "several buckets each"
    assert sorted(map(bucket_key, sent)) == sorted(map(bucket_key, received))
    for bucket in (*sent, *received):
        check_inside(bucket, of_version[bucket.args["version"]])
    for row, process in (("stage", "rollout-0/0"), ("commit", "rollout-0")):
        parts = trace.spans(process, row)
        assert [part.name for part in parts] == [f"{row} v{version}" for version in versions]
        for part in parts:
            check_inside(part, of_version[part.args["version"]])
    for rank in (0, 1):
        rows = trace.spans(f"trainer-{rank}", "training")
        assert [span.name for span in rows if ": " in span.name] == [f"policy: {step}" for step in steps]
        assert [span.name for span in rows].count("fence") == STEPS
        snapshots = trace.spans(f"trainer-{rank}", "snapshot")
        assert [span.name for span in snapshots] == [f"snapshot v{version}" for version in versions]
        for snapshot in snapshots:
            version = snapshot.args["version"]
            first = min(bucket.start for bucket in by_rank[rank] if bucket.args["version"] == version)
            assert snapshot.start <= first + SLACK_US, "what is sent is copied before, bucket by bucket"
    generations = trace.spans("rollout-0", "generation")
    assert len(generations) >= STEPS * 8, "groups of two, four a step"
    assert {generation.args["version_max"] for generation in generations} <= set(versions)


def bucket_key(bucket: Span) -> tuple[int, int]:
    return bucket.args["version"], bucket.args["index"]


def check_inside(inner: Span, outer: Span) -> None:
    assert outer.start - SLACK_US <= inner.start <= inner.end <= outer.end + SLACK_US, (inner, outer)
