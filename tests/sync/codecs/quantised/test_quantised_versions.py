"""Versions whose linear weights travel quantised: every rollout restores exactly what the reference quantiser leaves of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from direct_hop import Hop, MakeHop
from quantised_reference import left_of, reference_fp8
from slices import EVERYTHING, LAYOUTS, columns, of_rank, rows, values
from stores import newest
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ManifestError, ProtocolError
from weightlane.sync import (
    Expectation,
    ExpectedTensor,
    LocalShard,
    Manifest,
    Placement,
    SyncReport,
    TensorSpec,
    read_version,
)
from weightlane.sync.codecs.quantised.quantisation import is_quantised, needed_on_the_wire, pair_of, quantised_placement
from weightlane.sync.codecs.quantised.restored import RestorePlan
from weightlane.sync.send.snapshot.quantised_snapshot import quantised_slices, quantised_snapshot
from weightlane.sync.send.snapshot.snapshot import Progress

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (37, 24),
    "q.weight": (300, 200),
    "q.bias": (300,),
    "up.weight": (129, 257),
    "down.weight": (2, 128),
    "norm.weight": (24,),
    "empty.weight": (0, 24),
    "lm_head.weight": (41, 24),
}
"""No border between two or three trainer ranks is one between blocks, and of one matrix a third rank has nothing."""
SPECS = {name: TensorSpec(name, shape, torch.bfloat16) for name, shape in SHAPES.items()}
MATRICES = ("q.weight", "up.weight", "down.weight")


def weights(version: int) -> dict[str, torch.Tensor]:
    """The trainer's, float32."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def wanted(version: int) -> dict[str, torch.Tensor]:
    """Return a rollout's expected weights: unquantised tensors travel in bfloat16, the others are quantised from float32."""
    return {name: tensor.bfloat16() for name, tensor in left_of(weights(version)).items()}


def published(run: Hop, version: int) -> SyncReport:
    """Sync `version`; the next optimizer step waits for the snapshot only."""
    run.step(weights(version))
    run.publish(version)
    run.step(weights(version + 100))
    return run.sync(version)


@pytest.mark.parametrize(("engine", "trainers", "relay"), [("gloo", 2, "chain"), ("filesystem", 3, "off")])
def test_what_the_reference_leaves_is_what_rollouts_restore_relays_hand_on_and_a_store_and_a_rollback_keep(
    hop: MakeHop, tmp_path: Path, engine: str, trainers: int, relay: str
) -> None:
    run = hop(engine, rows, trainers, [EVERYTHING] * 3, specs=SPECS, quantise="fp8", relay=relay)
    for version in (1, 2):
        report = published(run, version)
        assert run.all_hold(wanted(version))
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < 0.03
        assert 0 < report.quantisation.max_abs < 0.5
    subscriber = run.rollouts[0].end
    subscriber.wait(2, HANG_S)
    previous, kept = subscriber.take_previous(3)
    assert previous == 2
    assert all(torch.equal(kept[name], tensor) for name, tensor in wanted(2).items())
    if engine == "filesystem":
        wait_until(lambda: newest(tmp_path / "store") == 2, "version that serves to be stored, too")
        manifest, stored = read_version(str(tmp_path / "store"))
        assert manifest.quantised == "fp8"
        for name in MATRICES:
            elements, scales = reference_fp8(weights(2)[name])
            assert torch.equal(stored[name].view(torch.uint8), elements.view(torch.uint8))
            assert torch.equal(stored[f"{name}_scale_inv"], scales)


def test_weights_that_no_scale_fits_fail_their_version_at_once_and_nothing_else(hop: MakeHop) -> None:
    run = hop("shm", rows, 2, [EVERYTHING], specs=SPECS, quantise="fp8")
    published(run, 1)
    poisoned = weights(2)
    poisoned["up.weight"][::64] = float("nan")
    run.step(poisoned)
    run.publish(2)
    run.fails(2, r"up\.weight holds inf or NaN")
    assert run.all_hold(wanted(1))
    for version in (2, 3):  # under the same number, with other weights: nothing of the failure is left
        published(run, version)  # the fence lets go of a version that failed
        assert run.all_hold(wanted(version))


def fp8_manifest(*changed: TensorSpec, without: str = "") -> Manifest:
    specs = {
        spec.name: spec
        for spec in (*quantised_placement(Placement.whole(SPECS.values())).specs, *changed)
        if spec.name != without
    }
    return Manifest(3, tuple(specs.values()), 64, quantised="fp8")


def expecting(*dtypes: torch.dtype, dtype: torch.dtype | None = None) -> Expectation:
    expected = {name: ExpectedTensor(shape, frozenset(dtypes)) for name, shape in SHAPES.items()}
    return Expectation(expected, dtype=dtype)


F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (("q.weight_scale_inv", (2, 2), F32), r"is float32 of shape \[2, 2\], q\.weight .* float32 of \[3, 2\]"),
        (("q.weight", (300, 200), BF16), r"q\.weight_scale_inv has no matrix in float8_e4m3fn to scale"),
        (None, r"q\.weight is quantised and its scales q\.weight_scale_inv are missing"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changed: tuple[Any, ...] | None, says: str) -> None:
    manifest = fp8_manifest(TensorSpec(*changed)) if changed else fp8_manifest(without="q.weight_scale_inv")
    with pytest.raises(ManifestError, match=says):
        RestorePlan(manifest, expecting(BF16))


def test_a_version_that_cannot_be_restored_here_is_refused_before_the_first_byte(hop: MakeHop) -> None:
    plain = fp8_manifest().to_plain() | {"quantised": "nf4"}
    with pytest.raises(ProtocolError, match="quantised: Input should be '' or 'fp8'"):
        RestorePlan(Manifest.from_plain(plain), expecting(BF16))
    assert {spec.dtype for spec in RestorePlan(fp8_manifest(), expecting(BF16, F32, dtype=F32)).specs} == {BF16, F32}
    with pytest.raises(ManifestError, match="the dtype to restore it to is not known"):
        RestorePlan(fp8_manifest(), expecting(BF16, F32))
    run = hop("shm", rows, 1, [EVERYTHING], "in_place", specs=SPECS, quantise="fp8")
    run.publish(1)
    run.fails(1, "cannot be restored in place")
    assert run.all_hold(0)


@pytest.mark.parametrize(
    ("quantised", "shape", "names"),
    [
        (True, (8, 8), ["self_attn.q_proj", "mlp.gate_proj", "mlp.experts.3.down_proj", "mlp.c_fc"]),
        (False, (8, 8), ["mlp.gate", "embed_tokens", "wte", "lm_head"]),
        (False, (8,), ["norm"]),
        (False, (8, 1, 4), ["mixer.conv1d"]),
        (False, (0, 8), ["mlp.experts.9.up_proj"]),
    ],
)
def test_weights_of_linear_layers_are_quantised_and_nothing_else(
    quantised: bool, shape: tuple[int, ...], names: list[str]
) -> None:
    for name in names:
        assert is_quantised(TensorSpec(f"model.h.0.{name}.weight", shape, torch.bfloat16)) == quantised, name
        assert not is_quantised(TensorSpec(f"model.h.0.{name}.weight", shape, torch.int64))


@pytest.mark.parametrize("whole", [False, True])
def test_a_snapshot_is_offered_as_far_as_it_is_there_and_parameters_may_change_once_read(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a large matrix, in a stream with the scales behind or ahead of all elements."""
    monkeypatch.setattr("weightlane.sync.send.snapshot.quantised_snapshot._CHUNK_NUMEL", 1 << 16)
    specs = [TensorSpec(f"{name}.weight", (700, 400), torch.float32) for name in "ab"]
    full = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in specs}
    shards = [LocalShard.whole(spec, full[spec.name]) for spec in specs]
    slices = quantised_slices(shards)
    layout = Manifest(0, quantised_placement(Placement.whole(specs)).specs, 1 << 20, whole_tensors=whole)
    offsets = {entry.spec.name: entry.offset for entry in layout.entries}
    snapshot = quantised_snapshot(shards, slices, [offsets[each.spec.name] for each in slices])
    memory = torch.full((layout.total_bytes,), 0xA5, dtype=torch.uint8)
    progress, seen = Progress("it", "test"), []
    progress.advance = lambda done, read: seen.append((done, memory[:done].clone(), read))  # type: ignore[misc, method-assign]
    snapshot.take(memory, None, progress)
    assert len(seen) >= 4
    for done, bytes_then, _ in seen:
        assert torch.equal(memory[:done], bytes_then), "bytes changed after they were said to be there"
    assert seen[-1][0] == layout.total_bytes
    assert [read for *_, read in seen] == sorted(read for *_, read in seen)
    assert snapshot.ends["a.weight"] < snapshot.ends["b.weight"] == snapshot.read_end
    views = layout.views(memory)
    for spec in specs:
        elements, scales = reference_fp8(full[spec.name])
        assert torch.equal(views[spec.name].view(torch.uint8), elements.view(torch.uint8))
        assert torch.equal(views[pair_of(spec).scales.name], scales)


# -- ranks that hold and need any slices ----------------------------------------------------------------------------------


SLICES = {
    "embed_tokens.weight": (37, 24),
    "q.weight": (300, 200),
    "o.weight": (130, 384),
    "norm.weight": (24,),
    "scale": (),
}
SLICED = {name: TensorSpec(name, shape, torch.float32) for name, shape in SLICES.items()}
"""Some borders of `LAYOUTS` divide their blocks of 128 x 128, and all between columns divide rows."""
TP2 = [of_rank(columns, 0, 2, SLICED), of_rank(columns, 1, 2, SLICED)]
ROWS2 = [of_rank(rows, 0, 2, SLICED), of_rank(rows, 1, 2, SLICED)]


@pytest.mark.parametrize(
    ("layout", "needs", "engine", "codec"),
    [("a mesh", ROWS2, "shm", "dense"), ("columns", TP2, "gloo", "delta")],
)
def test_whatever_slices_ranks_hold_and_need_everybody_restores_the_whole_quantised(
    hop: MakeHop, layout: str, needs: list[Placement | None], engine: str, codec: str
) -> None:
    """Also as deltas, where what one rank has of a block changes the scale of what another has."""
    run = hop(engine, *LAYOUTS[layout], needs, specs=SLICED, quantise="fp8", codec=codec, full_every=100)
    tensors = values(0, SLICED)
    for version in (1, 2):
        for tensor in tensors.values():
            tensor.view(-1)[version * 7 % tensor.numel()] *= 4
        run.step(tensors)
        run.publish(version)
        report = run.sync(version)
        assert report.codec == ("dense" if version == 1 else codec)
        assert run.all_hold(left_of(tensors))
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < 0.04


def test_a_rollout_that_needs_the_quantised_tensors_gets_its_slices_of_them_and_no_more(hop: MakeHop) -> None:
    wire = {spec.name: spec for spec in quantised_placement(Placement.whole(SLICED.values())).specs}
    asked = [needed_on_the_wire(needed, list(wire.values())) for needed in TP2]
    needs = [needed for needed in asked if needed is not None]
    run = hop("gloo", *LAYOUTS["rows"], needs, specs=SLICED, rollout_specs=wire, quantise="fp8")
    tensors = values(1, SLICED)
    run.step(tensors)
    run.publish(1)
    report = run.sync(1)
    for name in ("q.weight", "o.weight"):
        pair = pair_of(SLICED[name])
        tensors |= dict(zip((pair.weight.name, pair.scales.name), reference_fp8(tensors[name]), strict=True))
    assert run.all_hold(tensors)
    slices = len(run.publishers[0]._queue.session.layout.specs)  # up to 64 bytes each begin behind a gap
    assert report.sent_bytes <= sum(needed.nbytes for needed in needs) + 64 * slices
