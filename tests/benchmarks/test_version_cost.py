"""The benchmark of a version's fixed cost: what its rows are made of."""

from __future__ import annotations

from types import ModuleType

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
