"""Shards go straight from the trainer ranks that hold them to the rollout ranks that need them, whatever either look like."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from direct_hop import MakeHop
from slices import EVERYTHING, LAYOUTS, SPECS, TP2, copies, rows, values
from waiting import wait_until

from weightlane.ckpt_engines import Delivery, ManifestError, ProtocolError, QuorumError
from weightlane.ckpt_engines.engines.torch_distributed.gloo import GlooEngine
from weightlane.sync import LocalShard, Placement, TensorSpec
from weightlane.sync.plan import HolderMap
from weightlane.sync.send.rank_agreement import ReplicatedShards
from weightlane.sync.version.box import Box


@pytest.mark.parametrize(
    ("layout", "engine", "codec"),
    [
        ("columns", "gloo", "delta"),
        ("interleaved", "filesystem", "dense"),
        ("a mesh", "shm", "delta"),
        ("pieces", "shm", "dense"),
    ],
)
def test_whatever_the_layout_every_rank_gets_what_it_needs_bit_for_bit(
    hop: MakeHop, layout: str, engine: str, codec: str
) -> None:
    run = hop(engine, *LAYOUTS[layout], [*TP2, EVERYTHING], codec=codec, full_every=100)
    for version in (1, 2):
        assert run.serve(version).codec == ("dense" if version == 1 else codec)


def test_buckets_that_one_sender_broadcasts_to_several_sets_of_ranks_are_written_in_place_beside_each_other(
    hop: MakeHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank has three connections to each sender: their buckets come at the same time."""
    broadcasts = replace(GlooEngine.capabilities, delivery=frozenset({Delivery.BROADCAST}))
    monkeypatch.setattr(GlooEngine, "capabilities", broadcasts)
    run = hop("gloo", *LAYOUTS["a mesh"], [*TP2, EVERYTHING], commit="in_place")
    for version in (1, 2):
        run.serve(version)
    small = {"w": TensorSpec("w", (4, 3), torch.float32), "v": TensorSpec("v", (2, 1), torch.bfloat16)}
    run = hop("gloo", rows, 2, [EVERYTHING], commit="in_place", specs=small)  # a bucket of 26 bytes from each sender
    run.publish(1)
    run.sync(1)
    assert run.all_hold({name: tensor.to(small[name].dtype).float() for name, tensor in values(0, small).items()})


def test_each_element_crosses_the_wire_once_to_whoever_needs_it_and_none_to_others(hop: MakeHop) -> None:
    run = hop("gloo", *LAYOUTS["a mesh"], TP2)
    report = run.serve(1)
    # What both need goes to both in one broadcast; buckets have gaps between slices, each up to 64 bytes.
    both = {name: TP2[0].boxes[index][0].intersect(TP2[1].boxes[index][0]) for index, name in enumerate(SPECS)}
    twice = sum(box.numel for box in both.values() if box is not None) * 4
    least = sum(needed.nbytes for needed in TP2) - twice
    slices = 4 * sum(len(trainer.shards) for trainer in run.trainers)
    assert least <= report.sent_bytes <= least + 64 * slices


def test_copies_that_have_drifted_apart_fail_the_version_and_are_named(hop: MakeHop) -> None:
    run = hop("shm", copies, 3, [EVERYTHING])
    run.serve(1)
    for version in (2, 3):
        run.step(values(version))
        next(shard for shard in run.trainers[2].shards if shard.spec.name == "o").data[7, 9] += 1e-6
        run.publish(version)
        reason = run.fails(version, r"0 and .*2 hold different values of o|0 and trainer-2 hold")
        assert isinstance(reason, ManifestError)
        assert run.all_hold(1), "the old weights are not what serves"
    run.serve(4)


def test_a_little_is_compared_with_every_version_and_all_of_it_in_turn() -> None:
    spec = TensorSpec("w", (3 << 20,), torch.float32)
    shards = [
        LocalShard.whole(TensorSpec(f"w{number}", spec.shape, spec.dtype), torch.zeros(spec.shape))
        for number in range(3)
    ]
    placements = {rank: Placement.of_shards(shards) for rank in ("a", "b")}
    check = ReplicatedShards(HolderMap.of(placements).replicated(), shards)
    looked_at = [set(check.digests(publication, everything=False)) for publication in range(1, 4)]
    assert all(len(each) == 1 for each in looked_at)
    assert set.union(*looked_at) == set(check.digests(0, everything=True)) == {0, 1, 2}


def test_copies_are_compared_element_by_element_however_each_rank_has_cut_them() -> None:
    spec, data = TensorSpec("w", (6, 8), torch.float32), torch.arange(48.0).view(6, 8)
    cuts = {"a": [Box.whole(spec.shape)], "b": [Box((0, 0), (6, 5)), Box((0, 5), (6, 3))]}
    shards = {
        rank: [LocalShard(spec, box.starts, data[box.index].clone()) for box in boxes] for rank, boxes in cuts.items()
    }
    replicated = HolderMap.of({rank: Placement.of_shards(mine) for rank, mine in shards.items()}).replicated()
    checks = {rank: ReplicatedShards(replicated, mine) for rank, mine in shards.items()}
    said = {rank: check.digests(0, everything=True) for rank, check in checks.items()}
    checks["a"].compare(said, 1)
    shards["b"][1].data[2, 1] += 1
    said["b"] = checks["b"].digests(0, everything=True)
    with pytest.raises(ManifestError, match=r"version 1: a and b hold different values of w"):
        checks["a"].compare(said, 1)


def test_what_does_not_fit_is_refused_by_name_before_a_byte_moves_and_the_old_weights_serve_on(hop: MakeHop) -> None:
    wider = {**SPECS, "q": TensorSpec("q", (24, 193), torch.float32)}
    run = hop("shm", rows, 2, [TP2[0], EVERYTHING], specs=wider, rollout_specs=SPECS)
    run.publish(1)
    reason = run.fails(1, r"q has shape \[24, 193\], expected \[24, 192\]")
    assert "rollout-" in str(reason), "nobody says which rank it does not fit"
    assert isinstance(reason, ManifestError | QuorumError)
    assert run.all_hold(values(0))
    wait_until(
        lambda: not any("weightlane-connect" in each.name for each in threading.enumerate()), "end of connecting", 20.0
    )


def test_a_rank_with_another_plan_is_named_before_a_byte_moves(hop: MakeHop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hop("gloo", rows, 2, [EVERYTHING, EVERYTHING])
    connect = run.rollouts[1].end._connect_links

    def other_plan(*given: Any) -> SimpleNamespace:
        plan = connect(*given)
        return SimpleNamespace(digest=f"{plan.digest}0", relays=plan.relays)

    monkeypatch.setattr(run.rollouts[1].end, "_connect_links", other_plan)
    run.publish(1)
    reason = run.fails(1, r"different transfer plans: trainer-0 \w+, rollout-1/0 \w+0\.")
    assert isinstance(reason, ProtocolError)
    assert run.all_hold(0)
    monkeypatch.undo()
    run.serve(2)
