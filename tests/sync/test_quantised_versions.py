"""Versions whose linear weights travel quantised: every rollout restores exactly what the reference quantiser leaves of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hop import LINEAR, digest, weights
from hop_run import MakeRun, Run
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_reference import reference_fp8, reference_int8, restored
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ConfigError,
    Deadline,
    ManifestError,
    ProtocolError,
    QuarantinedError,
)
from weightlane.sync import (
    Expectation,
    ExpectedTensor,
    LocalShard,
    Manifest,
    Publisher,
    Rendezvous,
    TensorSpec,
    quantised_snapshot,
    read_version,
)
from weightlane.sync.boxes import Box
from weightlane.sync.codecs.quantised import Scheme
from weightlane.sync.delta_encoding import DeltaEncoder
from weightlane.sync.magnitudes import MagnitudeAgreement, largest
from weightlane.sync.packing import compact_places
from weightlane.sync.progress import Progress
from weightlane.sync.quantisation import is_quantised, pair_of, wire_specs
from weightlane.sync.quantised_snapshot import Magnitudes, QuantisedShards
from weightlane.sync.restored import Restoring
from weightlane.sync.snapshot import Remains
from weightlane.sync.transfer_plan import Network

MATRICES = ("q.weight", "up.weight", "down.weight")
REFERENCES = {"fp8": reference_fp8, "int8": reference_int8}
every_scheme = pytest.mark.parametrize("scheme", ["fp8", "int8"])


def left_of(tensors: dict[str, torch.Tensor], scheme: str, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Digests of what a rollout must hold."""
    made = {name: restored(tensor, scheme) if name in MATRICES else tensor for name, tensor in tensors.items()}
    return digest({name: tensor.to(dtype) for name, tensor in made.items()})


def begun(make_run: MakeRun, backend: str, scheme: str, **arguments: Any) -> Run:
    trainer = {"linear": True, "quantise": scheme} | arguments.pop("trainer", {})
    rollout = {"linear": True} | arguments.pop("rollout", {})
    return make_run(backend, trainer=trainer, rollout=rollout, **arguments)


@pytest.mark.parametrize(
    ("backend", "scheme", "trainers", "dtype", "network"),
    [
        ("gloo", "fp8", 2, "bfloat16", Network(sender_bytes_per_s=1e8, receiver_bytes_per_s=1e9, bucket_bytes=1024)),
        ("gloo", "int8", 3, "float32", None),
        ("shm", "int8", 1, "bfloat16", None),
        ("filesystem", "fp8", 3, "float32", None),
    ],
)
def test_rollouts_restore_what_the_reference_leaves_however_the_ranks_are_cut_and_by_relays(
    make_run: MakeRun, backend: str, scheme: str, trainers: int, dtype: str, network: Network | None
) -> None:
    wire = {"wire_dtype": dtype}
    run = begun(
        make_run, backend, scheme, trainers=trainers, replicas=3, trainer=wire | {"network": network}, rollout=wire
    )
    for version in (1, 2):
        run.step(version)
        run.publish(version)
        run.step(version + 100)
        report = run.sync(version)
        values = weights(version, torch.float32, shapes=LINEAR)
        # What is not quantised travels in the wire dtype; what is, is quantised from the trainer's float32.
        assert run.live() == [left_of(values, scheme, getattr(torch, dtype))] * 3
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < (0.03 if scheme == "fp8" else 0.01)
        assert 0 < report.quantisation.max_abs < 0.5
    if trainers == 1:
        assert report.sent_bytes < 115_000, "of 94,000 elements, hardly any takes four bytes"


def test_a_quantised_version_that_too_few_take_is_taken_back(make_run: MakeRun) -> None:
    run = begun(make_run, "gloo", "fp8", replicas=2, sync={"quorum": 1.0})
    for version in (1, 2):
        run.serve(version)
    run.replicas[1].fails_with = QuarantinedError("stopped half-way.", part="rollout-1")
    run.publish_next(3)
    run.aborts(3)
    assert run.live()[0] == left_of(weights(2, torch.float32, shapes=LINEAR), "fp8")


def test_a_store_keeps_a_standard_checkpoint_in_fp8(make_run: MakeRun, tmp_path: Path) -> None:
    run = begun(make_run, "filesystem", "fp8", trainers=2)
    run.serve(1)
    for trainer in run.trainers:
        trainer.call("wait", 1, HANG_S)  # by then the version is marked as committed
    manifest, tensors = read_version(str(tmp_path / "store"))
    assert manifest.quantised == "fp8"
    for name in MATRICES:
        elements, scales = reference_fp8(weights(1, torch.float32, shapes=LINEAR)[name])
        assert torch.equal(tensors[name].view(torch.uint8), elements.view(torch.uint8))
        assert torch.equal(tensors[f"{name}_scale_inv"], scales)


@pytest.mark.parametrize(("trainers", "known_before"), [(1, False), (2, True)])
def test_weights_that_no_scale_fits_fail_their_version_at_once_and_nothing_else(
    make_run: MakeRun, trainers: int, *, known_before: bool
) -> None:
    run = begun(make_run, "shm", "fp8", trainers=trainers, sync={"deadline_s": NEVER_S})
    run.serve(1)
    for trainer in run.trainers:
        trainer.call("poison", "up.weight")
    run.publish(2)
    if known_before:
        letters = run.coordinator._letters

        def is_known() -> bool:
            letters.catch_up()
            return bool(letters._failed)

        wait_until(is_known, "report of the failure")
    run.aborts(2, r"up\.weight holds inf or NaN")
    assert run.live() == [left_of(weights(1, torch.float32, shapes=LINEAR), "fp8")]
    for version in (2, 3):  # under the same number, with other weights: nothing of the failure is left
        run.serve(version)  # the fence lets go of a version that failed
        assert run.live() == [left_of(weights(version, torch.float32, shapes=LINEAR), "fp8")]


def test_what_cannot_be_restored_in_place_is_refused_before_the_first_byte(make_run: MakeRun) -> None:
    run = begun(make_run, "shm", "fp8", rollout={"commit": "in_place"})
    run.publish(1)
    run.aborts(1, "cannot be restored in place")
    assert run.live() == [digest(weights(0, torch.float32, shapes=LINEAR))]


SPECS = [TensorSpec(name, shape, torch.bfloat16) for name, shape in LINEAR.items()]


def fp8_manifest(*changed: TensorSpec, without: str = "") -> Manifest:
    specs = {spec.name: spec for spec in (*wire_specs(SPECS, "fp8"), *changed) if spec.name != without}
    return Manifest(3, tuple(specs.values()), 64, quantised="fp8")


def expecting(*dtypes: torch.dtype, dtype: torch.dtype | None = None) -> Expectation:
    return Expectation({spec.name: ExpectedTensor(spec.shape, frozenset(dtypes)) for spec in SPECS}, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "says"),
    [
        (
            "q.weight_scale_inv",
            (2, 2),
            "float32",
            r"is float32 of shape \[2, 2\], q\.weight .* needs float32 of \[3, 2\]",
        ),
        ("q.weight_scale_inv", (3, 2), "bfloat16", r"q\.weight_scale_inv is bfloat16 of shape \[3, 2\]"),
        ("q.weight", (300, 200), "bfloat16", r"q\.weight_scale_inv has no matrix in float8_e4m3fn to scale"),
        ("q.weight", (300, 200, 1), "float8_e4m3fn", r"q\.weight is quantised and has shape \[300, 200, 1\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], dtype: str, says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        Restoring(fp8_manifest(TensorSpec(name, shape, getattr(torch, dtype))), expecting(torch.bfloat16))


def test_scales_that_are_missing_are_named() -> None:
    with pytest.raises(ManifestError, match=r"q\.weight is quantised and its scales q\.weight_scale_inv are missing"):
        Restoring(fp8_manifest(without="q.weight_scale_inv"), expecting(torch.bfloat16))


def test_a_quantisation_that_is_not_known_here_is_refused() -> None:
    plain = fp8_manifest().to_plain() | {"quantised": "nf4"}
    with pytest.raises(ManifestError, match=r"quantised as 'nf4', which is not known here.*Known: fp8, int8"):
        Restoring(Manifest.from_plain(plain), expecting(torch.bfloat16))
    with pytest.raises(ProtocolError, match="quantised"):
        Manifest.from_plain(plain | {"quantised": 8})


def test_it_is_said_in_which_type_tensors_are_wanted() -> None:
    both = (torch.bfloat16, torch.float32)
    assert {spec.dtype for spec in Restoring(fp8_manifest(), expecting(*both, dtype=torch.float32)).specs} == set(both)
    with pytest.raises(ManifestError, match="not known in which type it is wanted"):
        Restoring(fp8_manifest(), expecting(*both))


def test_a_model_that_is_quantised_itself_gets_what_was_sent() -> None:
    manifest = fp8_manifest()
    native = Expectation({spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in manifest.specs})
    restoring = Restoring(manifest, native)
    assert restoring.specs == manifest.specs
    assert not restoring.restores
    staged = {spec.name: torch.zeros(spec.shape).to(spec.dtype) for spec in manifest.specs}
    assert restoring(staged) is staged


@pytest.mark.parametrize(
    ("quantised", "shape", "names"),
    [
        (True, (8, 8), ["h.0.self_attn.q_proj", "h.0.mlp.gate_proj", "h.0.mlp.experts.3.down_proj", "h.0.mlp.c_fc"]),
        (False, (8, 8), ["h.0.mlp.gate", "embed_tokens", "wte", "lm_head"]),
        (False, (8,), ["norm"]),
        (False, (8, 1, 4), ["h.0.mixer.conv1d"]),
        (False, (0, 8), ["h.0.mlp.experts.9.up_proj"]),
    ],
)
def test_weights_of_linear_layers_are_quantised_and_nothing_else(
    quantised: bool, shape: tuple[int, ...], names: list[str]
) -> None:
    for name in names:
        assert is_quantised(TensorSpec(f"model.{name}.weight", shape, torch.bfloat16)) == quantised, name
        assert not is_quantised(TensorSpec(f"model.{name}.weight", shape, torch.int64))
    assert not is_quantised(TensorSpec(f"model.{names[0]}.bias", shape, torch.bfloat16))


def test_a_model_without_linear_layers_is_refused_when_the_publisher_is_made(rendezvous: Rendezvous) -> None:
    norm = TensorSpec("norm.weight", (4,), torch.float32)
    with pytest.raises(ConfigError, match="no tensor of this checkpoint is the matrix of a linear layer"):
        Publisher(
            "trainer-0",
            rendezvous.address,
            shards=[LocalShard.whole(norm, torch.zeros(4))],
            engine=CheckpointEngineRegistry().create("shm"),
            bucket_bytes=1 << 16,
            quantise="fp8",
        )


def taken(
    shards: list[LocalShard], scheme: Scheme, *, pinned: bool = False
) -> tuple[QuantisedShards, Remains, torch.Tensor]:
    """A snapshot of shards, in which parts of blocks are not there yet."""
    ours, remains = QuantisedShards(shards, scheme), Remains()
    snapshot = ours.snapshot(compact_places(ours.held))
    device = "cpu" if pinned else shards[0].data.device if shards else "cpu"
    memory = torch.full((snapshot.nbytes,), 0xA5, dtype=torch.uint8, device=device, pin_memory=pinned)
    snapshot.take(memory, snapshot.mark(), Progress("it", "test"), remains)
    assert snapshot.is_cut == bool(remains.cuts)
    return ours, remains, memory


def complete_alone(remains: Remains, memory: torch.Tensor) -> None:
    """Quantise parts of blocks as if there were no others."""
    merged = largest(remains.magnitudes, {cut.pair.weight.name: cut.pair.scales.shape for cut in remains.cuts})
    for cut in remains.cuts:
        cut.quantise(merged[cut.pair.weight.name], memory)


class SeenProgress(Progress):
    """Remembers what was there at every step."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__("it", "test")
        self._memory = memory
        self.seen: list[tuple[int, torch.Tensor, int]] = []

    def advance(self, done_bytes: int, read: int | None = None) -> None:
        self.seen.append((done_bytes, self._memory[:done_bytes].clone(), read or 0))
        super().advance(done_bytes, read)


@every_scheme
def test_a_snapshot_is_offered_as_far_as_it_is_there_and_parameters_may_change_once_read(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a large matrix, in a stream with the scales behind or ahead of all elements."""
    monkeypatch.setattr(quantised_snapshot, "_CHUNK_NUMEL", 1 << 16)
    specs = [TensorSpec(f"{name}.weight", (700, 400), torch.float32) for name in "ab"]
    values = {spec.name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)) for spec in specs}
    shards = [LocalShard.whole(spec, values[spec.name].view(-1)) for spec in specs]
    ours = QuantisedShards(shards, scheme)
    for whole in (False, True):
        layout = Manifest(0, tuple(wire_specs(specs, scheme)), 1 << 20, whole_tensors=whole)
        offsets = {entry.spec.name: entry.offset for entry in layout.entries}
        snapshot = ours.snapshot([offsets[run.spec.name] for run in ours.held])
        memory = torch.full((layout.total_bytes,), 0xA5, dtype=torch.uint8)
        progress = SeenProgress(memory)
        snapshot.take(memory, None, progress)
        seen = progress.seen
        assert len(seen) >= 4
        for done, bytes_then, _ in seen:
            assert torch.equal(memory[:done], bytes_then), "bytes changed after they were said to be there"
        assert seen[-1][0] == layout.total_bytes
        assert [read for *_, read in seen] == sorted(read for *_, read in seen)
        assert snapshot.ends["a.weight"] < snapshot.ends["b.weight"] == snapshot.read_end
        views = layout.views(memory)
        for spec in specs:
            elements, scales = REFERENCES[scheme](values[spec.name])
            assert torch.equal(views[spec.name].view(torch.uint8), elements.view(torch.uint8))
            assert torch.equal(views[pair_of(spec, scheme).scales.name], scales)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@every_scheme
def test_a_gpu_quantises_into_its_own_memory_and_into_pinned_memory(scheme: str, *, pinned: bool) -> None:
    """Whole matrices, and parts that cut blocks: what is left of each is what the CPU leaves."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    spec = TensorSpec("a.weight", (700, 400), torch.float32)
    values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
    for box in (
        Box((0, 0), (700, 400)),
        Box((0, 0), (300, 400)),
        Box((300, 0), (400, 400)),
        Box((100, 60), (600, 300)),
    ):
        found = []
        for device in ("cpu", "cuda"):
            live = values[box.index].contiguous().to(device)
            _, remains, memory = taken([LocalShard(spec, box.starts, live)], scheme, pinned=pinned and device == "cuda")
            complete_alone(remains, memory)
            found.append(memory.cpu())
        assert torch.equal(*found)


@every_scheme
def test_a_sample_tells_about_how_much_a_delta_would_hold(scheme: str) -> None:
    spec = TensorSpec("a.weight", (640, 512), torch.float32)
    data = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
    boxes = [
        Box((0, 0), (640, 512)),  # a whole matrix
        Box((100, 0), (300, 512)),  # cut blocks on both sides
        Box((10, 0), (50, 512)),  # nothing but cut blocks
        Box((100, 60), (300, 400)),  # cut blocks on all four
    ]
    for box in boxes if scheme == "fp8" else boxes[:3]:
        live = data[box.index].clone()
        ours, remains, base = taken([LocalShard(spec, box.starts, live)], scheme)
        complete_alone(remains, base)
        encoder = DeltaEncoder(ours.held, compact_places(ours.held))
        assert encoder.sampled_density(base) == 0.0
        live[:, ::8] *= -1
        assert encoder.sampled_density(base) == pytest.approx(1 / 8, rel=0.05)


@settings(max_examples=30, deadline=None)
@given(
    row_cuts=st.lists(st.integers(0, 300), max_size=2),
    column_cuts=st.lists(st.integers(0, 280), max_size=2),
    ranks=st.integers(1, 3),
    scheme=st.sampled_from(["fp8", "int8"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whoever_holds_which_part_of_a_matrix_what_all_send_is_the_whole_quantised(
    row_cuts: list[int], column_cuts: list[int], ranks: int, scheme: Scheme, dtype: torch.dtype
) -> None:
    spec = TensorSpec("a.weight", (300, 280), dtype)
    values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows, columns = (
        [*itertools.pairwise([0, *sorted(cuts), size])]
        for cuts, size in zip((row_cuts, column_cuts), spec.shape, strict=True)
    )
    held: list[list[LocalShard]] = [[] for _ in range(ranks)]
    for number, ((top, bottom), (left, right)) in enumerate(itertools.product(rows, columns)):
        live = values[top:bottom, left:right].clone() if number % 2 else values.clone()[top:bottom, left:right]
        held[number % ranks].append(LocalShard(spec, (top, left), live))
    said: list[Magnitudes] = []
    snapshots = []
    for shards in held:
        ours, remains, memory = taken(shards, scheme)
        for shard in shards:
            shard.data.fill_(float("nan"))  # once it is taken, parameters may change
        said += remains.magnitudes
        snapshots.append((ours, remains, memory))
    pair = pair_of(spec, scheme)
    merged = largest(said, {spec.name: pair.scales.shape})
    sent = {each.name: torch.zeros(each.shape, dtype=each.dtype) for each in (pair.weight, pair.scales)}
    times = {each.name: torch.zeros(each.shape) for each in (pair.weight, pair.scales)}
    for ours, remains, memory in snapshots:
        for cut in remains.cuts:
            cut.quantise(merged[spec.name], memory)
        for mine, place in zip(ours.held, compact_places(ours.held), strict=True):
            part = memory[place : place + mine.nbytes].view(mine.spec.dtype).view(mine.box.shape)
            sent[mine.spec.name][mine.box.index] = part
            times[mine.spec.name][mine.box.index] += 1
    elements, scales = REFERENCES[scheme](values)
    assert torch.equal(sent[pair.weight.name].view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(sent[pair.scales.name], scales)
    assert all(bool((each == 1).all()) for each in times.values()), "an element or a scale is not sent once"


def test_only_blocks_that_a_border_divides_wait_for_other_ranks() -> None:
    spec = TensorSpec("a.weight", (512, 512), torch.float32)
    for box, waiting in ((Box((0, 128), (512, 256)), 0), (Box((0, 0), (512, 300)), 512 * 44)):
        _, remains, _ = taken([LocalShard(spec, box.starts, torch.ones(box.shape))], "fp8")
        assert sum(cut.data.numel() for cut in remains.cuts) == waiting


@pytest.mark.parametrize(
    "said",
    [
        7,
        [["a.weight", [0, 0], [1, 1], "AAAA"]],
        [["a.weight", [0, 0], [1, 1], "no base64"]],
        [["a.weight", [0, 0], [1, 2], "AAAAAA=="]],
        [["a.weight", [0, 1], [1, 1], "AAAAAA=="]],
        [["a.weight", [0], [1, 1], "AAAAAA=="]],
        [["a.weight"]],
    ],
)
def test_magnitudes_that_are_none_are_refused(rendezvous: Rendezvous, said: object) -> None:
    board = rendezvous.mailbox("magnitudes")
    board.put("1/other", said)
    agreement = MagnitudeAgreement(board, ["me", "other"], 0)
    agreement.say(1, [Magnitudes("a.weight", Box((0, 0), (1, 1)), torch.ones(1, 1))])
    with pytest.raises(ProtocolError):
        agreement.hear(1, {"a.weight": (1, 1)}, Deadline.after(HANG_S), lambda: True)
