"""Builds tiny vLLM models one after the other, without an engine, and compares ways to load them.

A `json_program`, whose functions are called.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cpu_paths import cpu_path  # noqa: F401 - tests call it by this name
from hub_forms import HUB_FORMS, HubForm
from json_program import serve
from layout_models import random_bits
from loaded_models import (
    broken_layer,
    committed,
    differing,
    forced,
    in_slices,
    loaded,
    odd_layers,
    ordinary,
    other,
    simulated_amx,
    state,
    tensors_of,
    written,
)
from rank_needs import rank_layout, slices_of_reloads  # noqa: F401 - tests call them by these names

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout.contract.rank_group import RankGroup
from weightlane.rollout.layout import version_loader as loader_module
from weightlane.rollout.layout.loading.checkpoint_expectation import checkpoint_specs, expectation_of_config
from weightlane.rollout.layout.map.coverage import Reads
from weightlane.rollout.layout.map.layout_map import SourceSpec
from weightlane.rollout.layout.offline.layout_report import make_report
from weightlane.rollout.layout.offline.rank_models import as_rank, engine_config, model_of_rank
from weightlane.rollout.layout.proof import rehearsal as rehearsal_module
from weightlane.rollout.layout.proof.rehearsal import Rehearsal
from weightlane.rollout.layout.rank_model import RankModel
from weightlane.rollout.layout.trace.trace import trace_loading
from weightlane.rollout.layout.version_loader import VersionLoader
from weightlane.rollout.layout.write.version_writer import VersionWriter
from weightlane.rollout.layout.write_method import choose_write_method
from weightlane.sync import LivePart, Manifest, Placement, TensorSpec, check_coverage


def compare(path: str, dtype: str, options: dict[str, Any], way: str = "", hub: str = "") -> dict[str, Any]:
    """Commit versions to a model that vLLM has loaded, and compare each with what vLLM makes of its files.

    Args:
        path: The checkpoint that it starts from.
        dtype: What it computes in.
        options: Further arguments of vLLM's.
        way: See `forced`.
        hub: The form of the checkpoint, one of `HUB_FORMS`; empty for the form that transformers writes.
    """
    form = HUB_FORMS.get(hub, HubForm(""))
    versions = [tensors_of(path, dtype)]
    versions += [other(versions[0], seed=1000), other(versions[0], seed=3000)]

    def stored(version: dict[str, torch.Tensor], folder: Path) -> Path:
        return form.cut(written(form.files(version), plain, folder, dtype))

    plain = path
    if hub:
        path = str(stored(versions[0], Path(path).parent / form.folder))
    config = engine_config(
        path,
        tensor_parallel=1,
        dtype=dtype,
        extra=options | {"max_model_len": 128, "use_tqdm_on_load": False},
    )
    with as_rank(config, 0), tempfile.TemporaryDirectory() as folder:
        try:
            wanted = [
                ordinary(stored(version, Path(folder) / str(number)), config) for number, version in enumerate(versions)
            ]
        except Exception as cause:  # noqa: BLE001 - vLLM's, which alone is at work
            return {"unbuilt": f"{type(cause).__name__}: {cause}"}
        again = ordinary(Path(folder) / "1", config)
        # What two ordinary loads of the same files do not have alike is memory that nothing is loaded into.
        unwritten = set(differing(wanted[1], again))
        model, expectation = loaded(config), expectation_of_config(config.model_config)
        loader = VersionLoader(RankModel(model, config, torch.device("cpu"), "test"), expectation=expectation)
        answer: dict[str, Any] = {"started": differing(state(model), ordinary(path, config)), "after": []}
        with forced(way):
            if hub:
                loader.learn(checkpoint_specs(path, config.model_config.dtype), RankGroup(None))
            needed = loader.needed() if hub else None
            for number in (1, 0, 2):
                try:
                    version = form.with_unread(versions[number]) if number else versions[number]
                    answer["way"] = taken(loader, version, needed if number == 2 else None, in_place=bool(hub))
                except WeightlaneError as error:
                    return answer | {"refused": str(error)}
                wrong = differing(state(model), wanted[number])
                answer["after"] += [name for name in wrong if name not in unwritten]
        method, plan = loader.method, loader.plan
        assert method is not None
        answer["sparse"] = []
        if plan is not None and method.kind == "traced":
            third = {name: tensor.clone() for name, tensor in versions[2].items()}
            for name in plan.sources:
                flat, new = third[name].view(-1), random_bits((third[name].numel(),), third[name].dtype, seed=len(name))
                positions = torch.arange(len(name) % min(3, flat.numel()), flat.numel(), 3)
                flat[positions] = new[positions]
                for found in plan.locate(name, positions):
                    found.storage.index_copy_(0, found.offsets, new[positions][found.chosen].to(found.storage.dtype))
            made = ordinary(stored(third, Path(folder) / "third"), config)
            answer["sparse"] = [name for name in differing(state(model), made) if name not in unwritten]
        return answer | {
            "reloaded": list(method.reloaded_layers),
            "summary": method.summary,
            "copies": len(method.layout.copies),
        }


def taken(loader: VersionLoader, version: dict[str, torch.Tensor], needed: Placement | None, *, in_place: bool) -> str:
    """Check a version, and commit it: in the slices that are `needed`, if these are given, and `in_place`, too, if not."""
    specs = tuple(TensorSpec(name, tuple(each.shape), each.dtype) for name, each in version.items())
    check_coverage(Manifest(0, specs, 1 << 20), loader.expectation, part="test")
    way = committed(loader, version if needed is None else in_slices(version, needed), RankGroup(None))
    if in_place and needed is None:
        loader.write_arriving(arriving(version, 4096))
    return way


def arriving(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> Iterator[LivePart]:
    """A version as a rank that takes it in place sees it: every bucket lies where the one before lay."""
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    manifest = Manifest(2, specs, bucket_bytes)
    stream = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
    for name, view in manifest.views(stream).items():
        view.copy_(tensors[name])
    bucket = torch.empty(bucket_bytes, dtype=torch.uint8)
    for index in range(manifest.bucket_count):
        start, stop = manifest.window(index)
        bucket.fill_(0xA5)[: stop - start] = stream[start:stop]
        for entry, low, high in manifest.tensors_within(start, stop):
            values = bucket[low - start : high - start].view(entry.spec.dtype)
            yield LivePart(entry.spec.name, (low - entry.offset) // entry.spec.dtype.itemsize, values)
    bucket.fill_(0xA5)


def in_place(path: str, dtype: str, bucket_bytes: int, hidden: str, unsteady: str = "") -> dict[str, Any]:
    """Take versions bucket after bucket: the way, what differs from a fresh load, and what learning has changed."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first = tensors_of(path, dtype)
    specs = {name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()}
    with as_rank(config, 0), odd_layers(hidden, unsteady), tempfile.TemporaryDirectory() as folder:
        model = loaded(config)
        loader = VersionLoader(RankModel(model, config, torch.device("cpu"), "test"))
        before = state(model)
        loader.learn(specs, RankGroup(None))
        after_learning = differing(before, state(model))
        second = other(first, seed=2000)
        for tensors in (second, first, second):
            loader.write_arriving(arriving(tensors, bucket_bytes))
        assert loader.method is not None
        return {
            "way": loader.method.kind,
            "reloaded": list(loader.method.reloaded_layers),
            "why": loader.method.summary,
            "after_learning": after_learning,
            "after": differing(state(model), ordinary(written(second, path, Path(folder) / "second", dtype), config)),
        }


@contextmanager
def noted_rehearsals() -> Iterator[list[bool]]:
    """Inside, the list gets for each rehearsal whether weights may move for it."""
    noted: list[bool] = []

    def made(*arguments: Any, may_move: bool, **named: Any) -> Rehearsal:
        noted.append(may_move)
        return Rehearsal(*arguments, may_move=may_move, **named)

    with mock.patch.object(loader_module, "Rehearsal", made):
        yield noted


def moved(path: str, dtype: str) -> dict[str, Any]:
    """Move a parameter's memory between two versions, then commit tensors in float32; report what the loader did."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first, alone = tensors_of(path, dtype), RankGroup(None)
    with as_rank(config, 0), noted_rehearsals() as rehearsed, tempfile.TemporaryDirectory() as folder:
        model = loaded(config)
        loader = VersionLoader(RankModel(model, config, torch.device("cpu"), "test"))
        committed(loader, first, alone)
        before = loader.plan
        parameter = next(model.parameters())
        parameter.data = parameter.data.clone()
        second = other(first, seed=5)
        committed(loader, second, alone)
        after = loader.plan
        wanted = ordinary(written(second, path, Path(folder) / "second", dtype), config)
        answer = {"traced_again": before is not after, "differing": differing(state(model), wanted)}
        committed(loader, first, alone)
        answer["kept"] = loader.plan is after
        wide = {name: random_bits(tuple(tensor.shape), torch.float32, seed=7) for name, tensor in first.items()}
        answer["ways"] = [committed(loader, wide, alone)]
        assert loader.plan is not None
        answer["sent"] = sorted({str(spec.dtype) for spec in loader.plan.sources.values()})
        wanted = ordinary(written(wide, path, Path(folder) / "wide", dtype), config)
        return answer | {"cast": differing(state(model), wanted), "rehearsed": len(rehearsed)}


def rehearsed_badly(path: str) -> str | None:
    """Rehearse with a version writer that leaves an element out; return the mismatch that the rehearsal finds."""
    config = engine_config(path, tensor_parallel=1, dtype="float32")
    specs = checkpoint_specs(path, torch.float32)
    name = "model.layers.1.mlp.down_proj.weight"

    class Sloppy(VersionWriter):
        """Nothing tells that it has not written all."""

        def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
            live = next(tensor for full, tensor in self._rank.model.named_parameters() if full == name).data.view(-1)
            before = live[-1].clone()
            super().write(tensors)
            live[-1] = before

    with as_rank(config, 0), mock.patch.object(rehearsal_module, "VersionWriter", Sloppy):
        model = loaded(config)
        layout = trace_loading(model, specs)
        method = choose_write_method(model, layout, [Reads.of(layout)])
        alone = RankGroup(None)
        rehearsal = Rehearsal(RankModel(model, config, torch.device("cpu"), "test"), specs, alone)
        return rehearsal.first_mismatch(method, None)


def experts_beside_kernel() -> dict[str, float]:
    """Largest differences of our experts with biases from vLLM's CPU kernel, and of one rank's from the sum of two ranks'."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    from weightlane.rollout.vllm_cpu.experts import _experts

    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    activation, tokens, hidden, inner, count, choices = "swigluoai", 9, 64, 32, 6, 2
    w1, w2 = normal(count, 2 * inner, hidden) / 4, normal(count, hidden, inner) / 4
    biases = normal(count, 2 * inner), normal(count, hidden)
    x, weights = normal(tokens, hidden), normal(tokens, choices).softmax(-1)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(tokens)]).int()
    wanted, got = torch.empty_like(x), torch.empty_like(x)
    packed = [cpu_prepack_moe_weight(tensor.clone(), "vec") for tensor in (w1, w2)]
    # vLLM 0.28 and 0.29 return the output.
    into = [wanted] if "out" in inspect.signature(cpu_fused_moe).parameters else []
    made = cpu_fused_moe(*into, x, *packed, *biases, weights, chosen, activation, "vec", False)
    wanted = wanted if made is None else made
    _experts(got, x, w1, w2, *biases, weights, chosen, None, activation)
    divided = torch.zeros_like(x)
    for held in ([0, 2, 5], [1, 3, 4]):
        places = torch.full((count,), -1, dtype=torch.int32)
        places[held] = torch.arange(3, dtype=torch.int32)
        part = torch.empty_like(x)
        mine = [bias[held] for bias in biases]
        _experts(part, x, w1[held], w2[held], *mine, weights, chosen, places, activation)
        divided += part
    return {
        "kernel": float((got - wanted).abs().max()),
        "divided": float((got - divided).abs().max()),
        "size": float(got.abs().mean()),
    }


def later_versions(path: str) -> dict[str, Any]:
    """Rehearsals of versions that go through vLLM's own loading since copies were wrong: in another type, with fewer tensors."""
    config = engine_config(path, tensor_parallel=1, dtype="bfloat16")
    first, alone = tensors_of(path, "bfloat16"), RankGroup(None)
    with as_rank(config, 0), odd_layers("down_proj", ""), noted_rehearsals() as may_move:
        loader = VersionLoader(RankModel(loaded(config), config, torch.device("cpu"), "test"))
        ways = [committed(loader, first, alone)]
        ways.append(committed(loader, {name: tensor.float() for name, tensor in first.items()}, alone))
        with suppress(WeightlaneError):
            loader.learn(dict(list(first.items())[:-1]), alone)
    return {"ways": ways, "may_move": may_move}


def report(path: str, tensor_parallel: int, expert_parallel: bool = False) -> dict[str, Any]:
    """Make the report that ``weightlane layout`` shows."""
    return make_report(path, tensor_parallel=tensor_parallel, dtype="auto", expert_parallel=expert_parallel)


def refused_with_amx(path: str, dtype: str, backend: str) -> list[str]:
    """Return type and message of the error of building a model with an attention backend, if any; see `simulated_amx`."""
    extra = {"attention_backend": backend} if backend else {}
    with simulated_amx():
        try:
            with model_of_rank(engine_config(path, tensor_parallel=1, dtype=dtype, extra=extra), 0):
                return []
        except WeightlaneError as error:
            return [type(error).__name__, str(error)]


def with_broken_layer(path: str, ending: str) -> list[str]:
    """Return the refusals of a report and of a worker if a layer raises an error when it computes; see `broken_layer`."""
    config = engine_config(path, tensor_parallel=1, dtype="float32")
    with broken_layer(ending):
        reported = make_report(path, tensor_parallel=1, dtype="float32")["refusal"]
        with as_rank(config, 0):
            loader = VersionLoader(RankModel(loaded(config), config, torch.device("cpu"), "test"))
            try:
                committed(loader, tensors_of(path, "float32"), RankGroup(None))
            except WeightlaneError as error:
                return [reported, f"{type(error).__name__}: {error}"]
    return [reported, ""]


def main() -> None:
    # A CPU worker does the same before it runs a model.
    torch.accelerator.empty_cache = lambda: None
    serve(sys.modules[__name__])


if __name__ == "__main__":
    main()
