"""Figures of the smaller benchmarks are computed as their pages say, and wrong bits are noticed."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch


def test_decoding_beside_a_sync_is_a_share_of_the_turn_just_before(decoding: ModuleType) -> None:
    """A machine that slows down during the benchmark does not count."""
    way = decoding.Way("shm", "keep")
    for alone, beside in ((100.0, 90.0), (50.0, 45.0), (10.0, 8.0)):
        way.pairs.append((decoding.Turn(alone, 0, 0.0, 2.0), decoding.Turn(beside, 4, 0.2, 2.0)))
    figures = way.figures()
    assert figures["share"] == {"median": 0.9, "min": 0.8, "max": 0.9}
    assert figures["versions_per_s"] == 2.0
    assert figures["blocked_s_per_version"] == pytest.approx(0.05)
    report = {
        "payload_bytes": 10**8, "tensors": 3, "concurrency": 8, "machine": {"cores": 2}, "rounds": 3,
        "rows": [{"threads": 1, **figures}], "verified": False,
    }  # fmt: skip
    assert " 0.90 " in decoding.text(report)
    assert "NOT VERIFIED" in decoding.text(report)


def test_a_changed_element_is_one_with_any_other_bit_on_the_wire_and_tied_weights_count_once(
    density: ModuleType,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight.detach().view(-1)
    weight.copy_(torch.tensor([0.0, float("nan"), 1.0, 1.0, 1e-39, *[0.5] * 11]))
    before = density.wire_bits(model)
    assert sum(tensor.numel() for tensor in before) == 16
    weight[0] = -0.0
    weight[2] = 1.001  # rounds to the same bfloat16
    weight[3] = 1.01
    assert density.changed_share(before, density.wire_bits(model)) == 2 / 16
    assert density.changed_share(before, before) == 0.0


def test_a_plan_that_moves_more_than_is_needed_is_not_verified(
    plan_scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape_named, explained = plan_scale.shape_named, plan_scale.plan_report
    monkeypatch.setattr(plan_scale, "shape_named", lambda name: dataclasses.replace(shape_named(name), layers=1))
    row = plan_scale.measure_case("30b", 2)
    assert row["verified"]
    assert len(row["wall_s"]) == len(row["cpu_s"]) == 2
    report = {"rows": [row], "verified": True}
    assert all(cell in plan_scale.markdown(report) for cell in plan_scale.cells(row))

    def one_byte_more(*arguments: Any, **settings: Any) -> dict[str, Any]:
        report: dict[str, Any] = explained(*arguments, **settings)
        return report | {"crossing_bytes": report["crossing_bytes"] + 1}

    monkeypatch.setattr(plan_scale, "plan_report", one_byte_more)
    assert not plan_scale.measure_case("30b", 1)["verified"]
    assert "NOT VERIFIED" in plan_scale.text(report | {"verified": False})


def test_every_operation_on_small_tensors_leaves_the_very_bits_and_a_missing_one_is_noticed(
    small_tensors: ModuleType,
) -> None:
    found = small_tensors.measure(50, 256, 1)
    assert found["verified"]
    assert all(taken["min"] > 0 for taken in found["seconds"].values())
    for name in ("snapshot of one rank", "buckets of two ranks", "commit"):
        torch.manual_seed(0)
        measured, as_sent = small_tensors.ways(50, 256)
        for other, way in measured.items():
            if other != name:
                way()
        assert not as_sent(), f"nobody notices that there was no {name}"
        for way in measured.values():
            way()
        assert as_sent()


def test_the_cost_of_a_version_is_the_median_and_the_95th_percentile(version_cost: ModuleType) -> None:
    carried = [version_cost.Carried(0.001 * turn, 0.002 * turn, 0.01 * turn) for turn in range(1, 22)]
    row = version_cost.figures("shm", carried)
    assert row["versions"] == 21
    assert row["trainer_blocked_s"] == {"median": pytest.approx(0.011), "p95": pytest.approx(0.02)}
    report = {"payload_bytes": 10**6, "concurrency": 64, "machine": {"cores": 2}, "rows": [row], "verified": False}
    assert "     11.0     20.0      22.0     40.0     110.0    200.0" in version_cost.text(report)
    assert "NOT VERIFIED" in version_cost.text(report)


@pytest.mark.parametrize("wrong_turn", [None, 3])
def test_the_bits_of_every_turn_of_version_cost_are_compared(version_cost: ModuleType, wrong_turn: int | None) -> None:
    turns: list[str] = []

    class Measured:
        async def connected(self, way: str) -> Any:
            async def carry() -> Any:
                return version_cost.Carried(1.0, 2.0, 3.0)

            return carry

        async def block(self) -> Any:
            return version_cost.Carried(4.0, 5.0, 6.0)

        async def differing(self) -> list[str]:
            turns.append("turn")
            return ["weight"] if len(turns) - 1 == wrong_turn else []

    options = argparse.Namespace(engine=["shm"], rounds=2, versions=3, between_s=0.0)
    found, verified = asyncio.run(version_cost.carry_in_turns(Measured(), options))
    assert verified is (wrong_turn is None)
    assert len(turns) == 4
    assert [carried.latency_s for carried in found["shm"]] == [3.0] * 6
    assert [carried.latency_s for carried in found[version_cost.BLOCKING]] == [6.0] * 6
