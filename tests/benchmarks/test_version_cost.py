"""The benchmark of a version's fixed cost: what its rows are made of."""

from __future__ import annotations

import argparse
import asyncio
from types import ModuleType
from typing import Any

import pytest


def test_a_row_has_the_median_and_the_95th_percentile_of_every_cost(version_cost: ModuleType) -> None:
    carried = [version_cost.Carried(0.001 * turn, 0.002 * turn, 0.01 * turn) for turn in range(1, 22)]
    row = version_cost.figures("shm", carried)
    assert row["versions"] == 21
    assert row["trainer_blocked_s"] == {"median": pytest.approx(0.011), "p95": pytest.approx(0.02)}
    assert row["rollout_blocked_s"] == {"median": pytest.approx(0.022), "p95": pytest.approx(0.04)}
    assert row["latency_s"] == {"median": pytest.approx(0.11), "p95": pytest.approx(0.2)}
    report = {"payload_bytes": 10**6, "concurrency": 64, "machine": {"cores": 2}, "rows": [row], "verified": False}
    assert "     11.0     20.0      22.0     40.0     110.0    200.0" in version_cost.text(report)
    assert "NOT VERIFIED" in version_cost.text(report)


@pytest.mark.parametrize("wrong_turn", [None, 0, 3])
def test_the_bits_of_every_turn_are_compared(version_cost: ModuleType, wrong_turn: int | None) -> None:
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
