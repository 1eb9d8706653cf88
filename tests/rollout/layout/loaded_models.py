"""Tiny vLLM models that are loaded in one way or another, their tensors, and how these differ."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bits import bits
from layout_models import random_bits
from tiny_models import copy_with

from weightlane.rollout.contract.rank_group import RankGroup
from weightlane.rollout.layout import version_loader as loader_module
from weightlane.rollout.layout.map.layout_map import Refusal
from weightlane.rollout.layout.offline.rank_models import engine_config
from weightlane.rollout.layout.version_loader import VersionLoader
from weightlane.rollout.layout.write_method import full_reload
from weightlane.sync import Placement, SlicedTensors, TensorSlice, TensorSpec
from weightlane.sync.plan.session_plan import Supply
from weightlane.sync.version.sliced_tensors import Slicing, without_data


def tensors_of(path: str, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in `dtype`, but those that it has in float32 next to others of that type."""
    from safetensors.torch import load_file

    tensors = load_file(Path(path) / "model.safetensors")
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        return tensors
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def other(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same names and shapes, any bits."""
    return {
        name: random_bits(tuple(tensor.shape), tensor.dtype, seed=seed + place)
        for place, (name, tensor) in enumerate(tensors.items())
    }


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The bytes of every parameter, buffer, and tensor that a layer, or an object of vLLM's inside it, holds besides."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        kept = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        for name, value in (*module._parameters.items(), *module._buffers.items(), *kept.items()):
            inside = vars(value) if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__") else {}
            for path, tensor in ((name, value), *((f"{name}.{inner}", item) for inner, item in inside.items())):
                if isinstance(tensor, torch.Tensor) and name != "kv_cache":
                    found[f"{prefix}.{path}"] = bits(tensor)
    return found


def committed(loader: VersionLoader, tensors: Mapping[str, torch.Tensor], group: RankGroup) -> str:
    """Put a version into the loader's model as a worker does; the way it went."""
    loader.learn(without_data(tensors), group, sliced=isinstance(tensors, SlicedTensors))
    loader.write(tensors)
    assert loader.method is not None
    return loader.method.kind


def in_slices(tensors: dict[str, torch.Tensor], needed: Placement) -> SlicedTensors:
    """A version as a rank receives it that needs these slices, which may have other names than the trainer's tensors."""
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    supply = Supply({"trainer-0": Placement.whole(specs)}, 64, checksummed=False, quantised="")
    wire = supply.on_the_wire(needed)
    assert wire is not None
    slicing = Slicing("plan", specs, tuple(TensorSlice(*each) for each in wire.slices))
    come = {each.as_tensor.name: tensors[each.spec.name][each.box.index].clone() for each in slicing.regions}
    return SlicedTensors(slicing, come)


def loaded(config: Any) -> torch.nn.Module:
    """Load a checkpoint's files into a model by vLLM's own start-up."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model_loader

    rotary_embedding._ROPE_DICT.clear()  # models that are alike share these, and convert them when they first compute
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def ordinary(model: str | Path, config: Any) -> dict[str, torch.Tensor]:
    """The state of a checkpoint that vLLM's own start-up has loaded on a rank like that of `config`.

    Nothing of weightlane takes part in the loading, and nothing is loaded twice into a model.
    """
    kept = config.model_config
    extra = {name: getattr(kept, name) for name in ("max_model_len", "model_impl", "runner")} | {
        "use_tqdm_on_load": False
    }
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    world = config.parallel_config.tensor_parallel_size
    fresh = engine_config(str(model), tensor_parallel=world, dtype=dtype, extra=extra)
    fresh.parallel_config.rank = config.parallel_config.rank
    return state(loaded(fresh))


def written(tensors: dict[str, torch.Tensor], like: str, folder: Path, dtype: str) -> Path:
    """The checkpoint that `like` is with these tensors, in `dtype`."""
    made = copy_with(tensors, Path(like), folder)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return made


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in one.keys() | two.keys()
        if name not in one or name not in two or not torch.equal(one[name], two[name])
    ]


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Inside, versions go through vLLM's own loading if `way` is ``reload``."""
    if way != "reload":
        yield
        return
    chosen = full_reload([Refusal("the model", "the test wants it")])
    with mock.patch.object(loader_module, "choose_write_method", return_value=chosen):
        yield


@contextmanager
def odd_layers(hidden: str, unsteady: str) -> Iterator[None]:
    """Inside, layers of one name compute from a copy of their weight that nobody sees, made when they are loaded.

    Those of the other name never compute the same twice; with ``between``, what lies before `down_proj` does not.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.models.llama import LlamaMLP

    process, compute = UnquantizedLinearMethod.process_weights_after_loading, UnquantizedLinearMethod.apply
    kernels: dict[int, torch.Tensor] = {}
    calls = itertools.count()

    def pack(self: Any, layer: Any) -> None:
        process(self, layer)
        kernels[id(layer)] = layer.weight.detach().clone()

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if hidden and layer.prefix.endswith(hidden):
            return torch.nn.functional.linear(x, kernels[id(layer)], bias)
        computed = compute(self, layer, x, bias)
        return computed + next(calls) if unsteady and layer.prefix.endswith(unsteady) else computed

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        activated = self.act_fn(self.gate_up_proj(x)[0])
        return self.down_proj(activated + next(calls) if unsteady == "between" else activated)[0]

    with (
        mock.patch.multiple(UnquantizedLinearMethod, process_weights_after_loading=pack, apply=apply),
        mock.patch.object(LlamaMLP, "forward", forward),
    ):
        yield


@contextmanager
def broken_layer(ending: str) -> Iterator[None]:
    """Inside, layers of that name raise an error when they compute."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    plain = UnquantizedLinearMethod.apply

    def breaking(self: Any, layer: Any, *arguments: Any) -> Any:
        if layer.prefix.endswith(ending):
            raise RuntimeError("invalid weight input features 16\nException raised from apply (gemm.cpp)")
        return plain(self, layer, *arguments)

    with mock.patch.object(UnquantizedLinearMethod, "apply", breaking):
        yield


@contextmanager
def simulated_amx() -> Iterator[None]:
    """Inside, vLLM takes this CPU for one with AMX, and packs weights as its kernel does, so far as dtypes and shapes go.

    The kernels that compute from packed weights are missing: a model can be built and loaded inside.
    """

    def packed(weight: torch.Tensor) -> torch.Tensor:
        outputs, inputs = weight.shape[-2:]
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8):
            raise RuntimeError("expect weight to be bfloat16, float16, int8, fp8_e4m3 or uint8(mxfp4 or int4).")
        if outputs % 16:
            raise RuntimeError(f"invalid weight out features {outputs}")
        if inputs % 32:
            raise RuntimeError(f"invalid weight input features {inputs}")
        return weight.clone()

    with (
        mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True),
        mock.patch.object(torch.ops._C, "convert_weight_packed", packed, create=True),
    ):
        yield
