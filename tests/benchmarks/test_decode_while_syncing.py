"""The benchmark of decoding beside a sync: what its shares are."""

from __future__ import annotations

from types import ModuleType

import pytest


def test_a_share_is_of_the_turn_just_before_so_that_a_machine_that_slows_down_does_not_count(
    decoding: ModuleType,
) -> None:
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
