"""Builds tiny vLLM models one after the other, without an engine, and compares ways to load them.

A `json_program`, whose functions are called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from json_program import serve
from layout_models import bits, random_bits

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout.agreement import RankGroup
from weightlane.rollout.checkpoint_values import CheckpointValues, checkpoint_specs
from weightlane.rollout.layout import CommitPlan, LayoutMap, SourceSpec, VersionLoader, needed_boxes, trace_loading
from weightlane.rollout.layout.rank_models import engine_config, model_of_rank
from weightlane.rollout.layout.report import make_report
from weightlane.rollout.weight_loading import load_version
from weightlane.sync import Manifest, Piece, Region, SlicedTensors, TensorSpec
from weightlane.sync.checksum import sums
from weightlane.sync.manifest import Slicing


def tensors_of(path: str, dtype: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(Path(path) / "model.safetensors").items()
    }


def other(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same names and shapes, any bits."""
    return {
        name: random_bits(tuple(tensor.shape), tensor.dtype, seed=seed + place)
        for place, (name, tensor) in enumerate(tensors.items())
    }


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The bytes of every parameter and buffer, and of tensors that layers keep beside them."""
    found = {name: bits(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}"] = bits(value)
    return found


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in one.keys() | two.keys()
        if name not in one or name not in two or not torch.equal(one[name], two[name])
    ]


def compare(path: str, dtype: str) -> dict[str, Any]:
    """Commit by a loader and by vLLM's reload: the way, what differs after a dense version, and after one of few changes."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first = tensors_of(path, dtype)
    with model_of_rank(config, 0) as model:

        def reload(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            load_version(model, config.model_config, tensors, part="test")
            return state(model)

        loader = VersionLoader(model, config, torch.device("cpu"), part="test")
        ways = [loader.load(first, RankGroup(None))]
        after_first = differing(state(model), reload(first))
        second = other(first, seed=1000)
        wanted = reload(second)
        reload(first)
        ways.append(loader.load(second, RankGroup(None)))
        after_second = differing(state(model), wanted)
        verdict = loader.verdict
        assert verdict is not None
        sparse: list[str] = []
        oracle: list[str] = []
        if (plan := loader.plan) is not None:
            third = {name: tensor.clone() for name, tensor in second.items()}
            for name in plan.sources:
                flat, new = third[name].view(-1), random_bits((third[name].numel(),), third[name].dtype, seed=len(name))
                positions = torch.arange(len(name) % 3, flat.numel(), 3)
                flat[positions] = new[positions]
                plan.scatter(name, positions, new[positions])
            sparse = differing(state(model), reload(third))
            oracle = probed(model, config, plan, first)
        return {
            "ways": ways,
            "reloaded": list(verdict.modules),
            "summary": verdict.summary,
            "after_first": after_first,
            "after_second": after_second,
            "sparse": sparse,
            "oracle": oracle,
            "slices": len(verdict.layout.slices),
        }


def probed(model: torch.nn.Module, config: Any, plan: CommitPlan, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Parameters for which loading numbered elements tells another origin than the layout does.

    Every element of the checkpoint has a number. vLLM's own loading carries its base-256 digits to the parameters, one version
    per digit, and the layout's slices carry the whole number: none of our copies is in the first, no value in the second.
    """
    first: dict[str, int] = {}
    count = 1  # 0 is what padding is made of.
    for name, tensor in tensors.items():
        first[name] = count
        count += tensor.numel()
    seen = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in plan.layout.targets.items()}
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for digit in range((count.bit_length() + 7) // 8):
        version = {
            name: (torch.arange(first[name], first[name] + tensor.numel()) >> 8 * digit & 255)
            .view(tensor.shape)
            .to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        load_version(model, config.model_config, version, part="test")
        for name, numbers in seen.items():
            numbers.add_(live[name].to(torch.int64) << 8 * digit)
    wrong = []
    for name, spec in plan.layout.targets.items():
        size = live[name].untyped_storage().nbytes() // spec.dtype.itemsize
        told = torch.zeros(size, dtype=torch.int64)
        for piece in plan.layout.slices:
            if piece.target == name:
                source = torch.arange(first[piece.source], first[piece.source] + tensors[piece.source].numel())
                value = source.as_strided(piece.shape, piece.source_strides, piece.source_offset)
                told.as_strided(piece.shape, piece.target_strides, piece.target_offset).copy_(value)
        if not torch.equal(told.as_strided(spec.shape, spec.strides, spec.offset), seen[name]):
            wrong.append(name)
    return wrong


def arriving(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> Iterator[Piece]:
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
        for entry, low, high in manifest.pieces(start, stop):
            values = bucket[low - start : high - start].view(entry.spec.dtype)
            yield Piece(entry.spec.name, (low - entry.offset) // entry.spec.dtype.itemsize, values)
    bucket.fill_(0xA5)


def in_place(path: str, dtype: str, bucket_bytes: int, stale: str) -> dict[str, Any]:
    """Take versions bucket after bucket: the way, what differs from a reload, whether the proof left the checkpoint."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first = tensors_of(path, dtype)
    specs = {name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()}
    with model_of_rank(config, 0) as model:
        load_version(model, config.model_config, first, part="test")
        if stale:
            pack_secretly(model, stale)
        loader = VersionLoader(model, config, torch.device("cpu"), part="test")
        before, alone = state(model), RankGroup(None)
        if not loader.proven(specs, alone, whole=True):
            with CheckpointValues(path, specs, {}) as values:
                loader.prove(values, alone)
        after_proof = differing(before, state(model))
        second = other(first, seed=2000)
        for tensors in (first, second):
            assert loader.proven(specs, alone, whole=True)
            way = loader.load_pieces(arriving(tensors, bucket_bytes))
        got = state(model)
        load_version(model, config.model_config, second, part="test")
        assert loader.verdict is not None
        return {
            "way": way,
            "reloaded": list(loader.verdict.modules),
            "after_proof": after_proof,
            "after": differing(got, state(model)),
        }


def moved(path: str, dtype: str) -> dict[str, Any]:
    """What a loader does when a parameter gets other memory between two versions, and another set of tensors comes."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first = tensors_of(path, dtype)
    with model_of_rank(config, 0) as model:
        loader = VersionLoader(model, config, torch.device("cpu"), part="test")
        loader.load(first, RankGroup(None))
        before = loader.plan
        parameter = next(model.parameters())
        parameter.data = parameter.data.clone()
        second = other(first, seed=5)
        loader.load(second, RankGroup(None))
        after = loader.plan
        got = state(model)
        load_version(model, config.model_config, second, part="test")
        answer = {"traced_again": before is not after, "differing": differing(got, state(model))}
        loader.load(first, RankGroup(None))
        answer["kept"] = loader.plan is after
        wide = {name: random_bits(tuple(tensor.shape), torch.float32, seed=7) for name, tensor in first.items()}
        loader.load({name: tensor.float() for name, tensor in first.items()}, RankGroup(None))
        answer["ways"] = [loader.load(wide, RankGroup(None))]
        assert loader.plan is not None
        answer["sent"] = sorted({str(spec.dtype) for spec in loader.plan.sources.values()})
        got = state(model)
        load_version(model, config.model_config, wide, part="test")
        return answer | {"cast": differing(got, state(model))}


def pack_secretly(model: torch.nn.Module, ending: str) -> str:
    """Let the first layer of that name compute from a copy of its weight that nobody sees; its full name."""
    name, layer = next((name, item) for name, item in model.named_modules() if name.endswith(ending))
    method = layer.quant_method

    class Packing(type(method)):  # type: ignore[misc]  # whatever it is
        """Keeps what it computes from out of sight."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            packed = layer.weight.detach().clone()
            self.kernel = lambda x: torch.nn.functional.linear(x, packed)

        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return self.kernel(x)

    method.__class__ = Packing
    method.process_weights_after_loading(layer)
    return name


def hide_an_expert(model: torch.nn.Module) -> None:
    """Let the last expert of the first layer compute from a copy of its weight that nobody sees."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layer = next(layer for layer in model.modules() if isinstance(layer, RoutedExperts))
    method, kernel = layer.quant_method, layer.quant_method.moe_kernel.fused_experts
    compute = kernel.apply

    class Packing(type(method)):  # type: ignore[misc]  # whatever it is
        """Keeps what one expert computes from out of sight."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            super().process_weights_after_loading(layer)
            self.hidden = layer.w2_weight[-1].detach().clone()

    def apply(w2: torch.Tensor, **others: Any) -> None:
        compute(w2=torch.cat([w2[:-1], method.hidden.unsqueeze(0)]), **others)

    method.__class__ = Packing
    kernel.apply = apply
    method.process_weights_after_loading(layer)


def stale_expert(path: str, dtype: str) -> dict[str, Any]:
    """As `stale`, of one expert."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    with model_of_rank(config, 0) as model:
        hide_an_expert(model)
        loader = VersionLoader(model, config, torch.device("cpu"), part="test")
        way = loader.load(tensors_of(path, dtype), RankGroup(None))
        assert loader.verdict is not None
        return {"way": way, "why": loader.verdict.summary}


def experts_beside_kernel(activation: str, biased: bool) -> dict[str, float]:
    """Largest differences of our experts from vLLM's CPU kernel, and of one rank's from the sum of two ranks'."""
    from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight

    from weightlane.rollout.cpu_experts import _experts

    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens, hidden, inner, count, choices = 9, 64, 32, 6, 2
    w1, w2 = normal(count, 2 * inner, hidden) / 4, normal(count, hidden, inner) / 4
    biases = (normal(count, 2 * inner), normal(count, hidden)) if biased else (None, None)
    x, weights = normal(tokens, hidden), normal(tokens, choices).softmax(-1)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(tokens)]).int()
    wanted, got = torch.empty_like(x), torch.empty_like(x)
    packed = [cpu_prepack_moe_weight(tensor.clone(), "vec") for tensor in (w1, w2)]
    cpu_fused_moe(wanted, x, *packed, *biases, weights, chosen, activation, "vec", False)
    _experts(got, x, w1, w2, *biases, weights, chosen, None, activation)
    divided = torch.zeros_like(x)
    for held in ([0, 2, 5], [1, 3, 4]):
        places = torch.full((count,), -1, dtype=torch.int32)
        places[held] = torch.arange(3, dtype=torch.int32)
        part = torch.empty_like(x)
        mine = [None if bias is None else bias[held] for bias in biases]
        _experts(part, x, w1[held], w2[held], *mine, weights, chosen, places, activation)
        divided += part
    return {
        "kernel": float((got - wanted).abs().max()),
        "divided": float((got - divided).abs().max()),
        "size": float(got.abs().mean()),
    }


def stale(path: str, dtype: str) -> dict[str, Any]:
    """A layer that secretly computes from a copy of its weight: the way its versions go, and why."""
    config = engine_config(path, tensor_parallel=1, dtype=dtype)
    first = tensors_of(path, dtype)
    with model_of_rank(config, 0) as model:
        name = pack_secretly(model, "down_proj")
        loader = VersionLoader(model, config, torch.device("cpu"), part="test")
        way = loader.load(first, RankGroup(None))
        assert loader.verdict is not None
        return {"way": way, "why": loader.verdict.summary, "layer": name}


def rank_layout(path: str, dtype: str, rank: int, world: int, expert_parallel: bool) -> dict[str, Any]:
    """The layout that one rank of several would trace."""
    config = engine_config(path, tensor_parallel=world, dtype=dtype, expert_parallel=expert_parallel)
    with model_of_rank(config, rank) as model:
        specs = {
            name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(path, dtype).items()
        }
        return trace_loading(model, specs).to_plain()


def used_elements(layout: LayoutMap) -> dict[str, torch.Tensor]:
    """Which elements of each source the slices read."""
    found = {name: torch.zeros(spec.numel, dtype=torch.bool) for name, spec in layout.sources.items()}
    for piece in layout.slices:
        found[piece.source].as_strided(piece.shape, piece.source_strides, piece.source_offset).fill_(True)
    return found


def needs(path: str, dtype: str, world: int, expert_parallel: bool) -> list[dict[str, Any]]:
    """For each rank its boxes, and the tensors of which they hold an element twice, too few or too many."""
    config = engine_config(path, tensor_parallel=world, dtype=dtype, expert_parallel=expert_parallel)
    specs = {name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors_of(path, dtype).items()}
    answers = []
    for rank in range(world):
        with model_of_rank(config, rank) as model:
            layout = trace_loading(model, specs)
        boxes, wrong = needed_boxes(layout), {}
        for name, used in used_elements(layout).items():
            times = torch.zeros(specs[name].shape, dtype=torch.int32)
            for box in boxes[name]:
                times[box.index] += 1
            held = times.flatten() > 0
            counts = [int((times > 1).sum()), int((used & ~held).sum()), int((held & ~used).sum())]
            if any(counts):
                wrong[name] = counts
        plain = {name: [box.to_plain() for box in each] for name, each in boxes.items()}
        answers.append({"boxes": plain, "wrong": wrong})
    return answers


class LoaderOfOneRank(VersionLoader):
    """No rank can compute without the others: what it holds is compared instead."""

    def _compute(self) -> dict[str, str]:
        return {name: sums(held) for name, held in state(self._model).items()}


def quantised_slices(path: str, other_path: str, world: int) -> list[dict[str, Any]]:
    """A version of which each rank of a quantised model gets only what it asks for: what it asks for, and what it then holds."""
    from safetensors.torch import load_file

    config, alone = engine_config(path, tensor_parallel=world, dtype="bfloat16"), RankGroup(None)
    first, second = (load_file(Path(model) / "model.safetensors") for model in (path, other_path))
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody has written holds NaN
    answers = []
    for rank in range(world):
        with model_of_rank(config, rank) as model:
            load_version(model, config.model_config, second, part="test")
            wanted = state(model)
            load_version(model, config.model_config, first, part="test")
            before = state(model)
            specs = checkpoint_specs(path, torch.bfloat16)
            blind = LoaderOfOneRank(model, config, torch.device("cpu"), part="test")
            assert not blind.proven(specs, alone, whole=False)
            assert blind._read is not None
            blind._read["model.layers.1.mlp.up_proj.weight"].pop()
            loader = LoaderOfOneRank(model, config, torch.device("cpu"), part="test")
            assert not loader.proven(specs, alone, whole=False)
            assert loader.needed() is None, "slices are asked for before it is shown that they are enough"
            with CheckpointValues(path, specs, {}) as values:
                blind.prove(values, alone)
                loader.prove(values, alone)
            touched = differing(before, state(model))
            needed = loader.needed()
            assert needed is not None
            slicing = Slicing("plan", needed.specs, tuple(Region(*each) for each in needed.slices))
            come = {
                region.as_tensor.name: second[region.spec.name][region.box.index].clone() for region in slicing.regions
            }
            way = loader.load(SlicedTensors(slicing, come), alone)
            answers.append(
                {
                    "way": way,
                    "blind": blind.needed() is None,
                    "touched": touched,
                    "changed": len(differing(before, state(model))),
                    "differing": differing(wanted, state(model)),
                    "boxes": {
                        spec.name: [box.to_plain() for box in boxes]
                        for spec, boxes in zip(needed.specs, needed.boxes, strict=True)
                    },
                }
            )
            del come[next(iter(come))]
            less = Slicing("plan", needed.specs, slicing.regions[1:])
            try:
                loader.load(SlicedTensors(less, come), alone)
            except WeightlaneError as error:
                answers[-1]["refused"] = str(error)
    torch.use_deterministic_algorithms(False)
    return answers


def report(path: str, tensor_parallel: int, expert_parallel: bool) -> dict[str, Any]:
    """What ``weightlane layout`` shows."""
    return make_report(path, tensor_parallel=tensor_parallel, dtype="auto", expert_parallel=expert_parallel)


def refused(path: str, tensor_parallel: int) -> list[str]:
    """What a report of that model ends with."""
    try:
        make_report(path, tensor_parallel=tensor_parallel, dtype="float32")
    except WeightlaneError as error:
        return [type(error).__name__, str(error)]
    return []


def main() -> None:
    # A CPU worker does the same before it runs a model.
    torch.accelerator.empty_cache = lambda: None
    serve(sys.modules[__name__])


if __name__ == "__main__":
    main()
