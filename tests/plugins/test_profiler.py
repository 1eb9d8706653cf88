"""Ranks that are profiled write the steps that were asked for."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.config.run_config import load_config
from weightlane.plugins import make_hooks
from weightlane.plugins.loading import OBSERVERS
from weightlane.plugins.profiler import PROFILE_ENV, ProfileSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "arithmetic.toml"


def recorded(trace: Path) -> set[str]:
    """Names of the marks of `work` in a trace."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    return {name for event in events if (name := str(event.get("name"))).startswith("work ")}


def work(number: int) -> None:
    """Compute in a thread of its own, as vLLM does next to the thread that receives versions."""

    def compute() -> None:
        with record_function(f"work {number}"):
            torch.ones(8, 8) @ torch.ones(8, 8)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


def test_a_rank_that_was_asked_for_writes_its_steps_and_no_other_does(tmp_path: Path) -> None:
    make = OBSERVERS[PROFILE_ENV]
    settings = ProfileSettings(steps=2, wait=1, ranks=(0, 3), dir=tmp_path / "traces").model_dump_json()
    first, second, critic, rollout = (make_hooks([make(settings)]) for _ in range(4))
    for step in range(1, 9):
        work(step)
        for _ in ("policy", "critic"):
            first.rank_stepped(rank=0, step=step, facts={"participant": "trainer-0"})
        second.rank_stepped(rank=1, step=step, facts={"participant": "trainer-1"})
    for version in range(1, 6):
        critic.rank_stepped(rank=0, step=version, facts={"participant": "critic-0"})  # it is on ranks of its own
    for version in range(1, 6):
        work(version)
        rollout.version_staged(version=version, facts={"participant": "rollout-1/3"})
    assert [*first.reports, *second.reports, *critic.reports, *rollout.reports] == []
    written = sorted(path.name.removesuffix(".json.gz") for path in (tmp_path / "traces").iterdir())
    assert written == ["critic-0", "rollout-1-3", "trainer-0"]
    assert recorded(tmp_path / "traces/trainer-0.json.gz") == {"work 4", "work 5"}
    assert recorded(tmp_path / "traces/rollout-1-3.json.gz") == {"work 4", "work 5"}


def test_a_run_that_is_too_short_for_its_profile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loop.steps \(3\).*observers.profile.*5 steps"):
        load_config(EXAMPLE, ["loop.steps=3", "observers.profile.steps=3"])
    assert load_config(EXAMPLE, ["loop.steps=3"]).observers.profile.all_steps == 0
