"""The benchmark of direct transfers: every way carries every bit, and what is wrong or slower is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def direct(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("direct")


def test_all_ways_carry_the_same_weights(
    direct: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "direct.json"
    assert direct.main(["--model", "tiny", "--rounds", "1", "--json", str(to)]) == 0
    report = json.loads(to.read_text())
    assert report["verified"]
    assert list(report["rows"]) == ["gathered", "direct", "direct, sealed"]
    assert all(row["latency_s"]["median"] > 0 for row in report["rows"].values())
    held = sum(report["held_trainer_bytes"])
    assert held == report["payload_bytes"] <= sum(report["held_rollout_bytes"])
    assert abs(report["sent_bytes"] - held) <= 0.05 * held, "each element goes once"
    assert f"direct is never slower: {'met' if _slowest(report) <= 1 else 'MISSED'}" in capsys.readouterr().out


def _slowest(report: dict[str, dict[str, dict[str, float]]]) -> float:
    return max(row["latency_of_gathered"] for name, row in report["rows"].items() if name != "gathered")


def test_wrong_weights_are_noticed(direct: ModuleType) -> None:
    workload = direct.named_workload("tiny")
    with direct.Ranks(workload, 60.0) as ranks:

        class Nothing:
            name = "nothing is carried"

            def round(self) -> dict[str, float]:
                return {"latency_s": 0.0}

        measured = direct.Measurement(ranks)
        measured.round(Nothing())
    assert measured.wrong == len(workload.specs) * direct.ROLLOUTS
