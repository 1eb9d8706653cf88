"""The benchmark of direct transfers: every way carries every bit, and what is wrong or slower is said."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import HANG_S


class Nothing:
    name = "nothing is carried"

    def round(self) -> dict[str, float]:
        return {"latency_s": 0.0}


@pytest.mark.exhaustive
def test_all_ways_carry_the_same_weights_and_wrong_ones_are_noticed(
    direct: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_rounds = direct.Measurement.rounds
    wrong: list[int] = []

    def and_then_nothing(measured: Any, *arguments: Any) -> Any:
        found = measured_rounds(measured, *arguments)
        wrong.append(measured.wrong)
        measured.round(Nothing())
        wrong.append(measured.wrong)
        measured.wrong = wrong[0]
        return found

    monkeypatch.setattr(direct.Measurement, "rounds", and_then_nothing)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay in this process
    to = tmp_path / "direct.json"
    command = ["--model", "tiny", "--rounds", "1", "--deadline-s", str(HANG_S), "--json", str(to)]
    assert direct.main(command) == 0
    assert wrong == [0, len(direct.named_workload("tiny").specs) * direct.ROLLOUTS]
    report = json.loads(to.read_text())
    assert report["verified"]
    assert list(report["rows"]) == ["gathered", "direct", "direct, checksummed"]
    assert all(row["latency_s"]["median"] > 0 for row in report["rows"].values())
    held = sum(report["held_trainer_bytes"])
    assert held == report["payload_bytes"] <= sum(report["held_rollout_bytes"])
    assert abs(report["sent_bytes"] - held) <= 0.05 * held, "each element goes once"
    for latency, said in ((0.9, "met"), (1.1, "MISSED")):
        told = copy.deepcopy(report) | {"verified": False}
        told["rows"]["direct"]["latency_of_gathered"] = latency
        told["rows"]["direct, checksummed"]["latency_of_gathered"] = 0.5
        assert f"direct is never slower: {said} ({latency:.2f} of gathered)" in direct.text(told)
        assert "NOT VERIFIED" in direct.text(told)
