"""The benchmark of many small tensors completes every operation that it measures, and reports one that is incomplete."""

from __future__ import annotations

from types import ModuleType

import torch


def test_every_way_leaves_the_very_bits_and_a_wrong_one_is_noticed(small_tensors: ModuleType) -> None:
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
