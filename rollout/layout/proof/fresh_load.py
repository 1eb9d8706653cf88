"""Loads given values by vLLM's ordinary loading: the oracle by which every other way to put weights into a model is judged.

A second model is built like the one that serves, with weights that are made up. It never serves, and nothing but vLLM's own
start-up code loads it, so that whatever a reload leaves behind, or a copy misses, shows when it is laid beside it.
"""

from __future__ import annotations

import copy
import gc
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import LoadConfig

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime.device_checksum import sums
from weightlane.sync.version.sliced_tensors import LazyTensors
from weightlane.sync.version.tensor_spec import raw_bytes

from ...vllm_internals.internals import BaseModelLoader, set_current_vllm_config
from ..loading.derived import LeftBehind
from ..map.layout_map import SourceSpec
from .equal_compute import Patterned

_PERIOD = 1_048_573
"""Elements after which made-up values repeat: a prime, so that no row or head begins where another does."""
_MANTISSA = 0x7F
"""All of a made-up value's eight bits but the sign; in e4m3, NaN has all of these set."""
_NO_WEIGHTS = ("kv_cache", "handler_tensor", "_moe_state")
"""Attributes that hold no weights: other memory as soon as a model serves, an address of a library's own object, and which
experts the tokens of one call have chosen.

What such an object keeps shows in what its layer computes.
"""
_MODULE = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
_DEPTH = 8
"""How many objects deep tensors are looked for."""
_ROOM = 1.3
"""Free memory that a second model needs, in sizes of the first; what layers take in passing after a load is in it."""


class MadeUpValues(LazyTensors):
    """A version of given tensors whose values depend on name, place and `seed` alone; each is made when it is asked for.

    Every element differs between two seeds, also in bfloat16 and after a cast to it. What is called a scale is positive.

    Args:
        specs: The tensors.
        seed: 0 or 1.
        device: Where they are made.
    """

    def __init__(self, specs: Mapping[str, SourceSpec], seed: int, device: torch.device) -> None:
        self._specs, self._device = specs, device
        hashed = torch.arange(_PERIOD, dtype=torch.int64, device=device) * 0x9E3779B1 >> 9
        self._codes = (hashed & 0xFF).to(torch.uint8) ^ (0x55 * seed)
        self._periods: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        """One period of the values for each type, signed or not. A tensor is cut out of its repetitions."""

    def __getitem__(self, name: str) -> torch.Tensor:
        spec, signed = self._specs[name], "scale" not in name
        if (period := self._periods.get((spec.dtype, signed))) is None:
            period = self._periods[spec.dtype, signed] = self._period(spec.dtype, signed=signed)
        start = zlib.crc32(name.encode()) % _PERIOD
        repeats = (start + spec.numel) // _PERIOD + 1
        return period.repeat(repeats)[start : start + spec.numel].view(spec.shape)

    def _period(self, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
        codes = self._codes
        if not dtype.is_floating_point:
            return (codes & 1).to(dtype) if dtype != torch.int8 else codes.view(torch.int8)
        if dtype.itemsize == 1:
            return torch.where(codes & _MANTISSA == _MANTISSA, codes - 2, codes).view(dtype)
        # A mantissa of seven bits and an exponent of two are exact in every type; the sign is the hash's parity.
        mantissa, exponent = (codes & _MANTISSA).float(), (codes >> 3 & 3).float()
        size = (1 + mantissa / 128) * torch.exp2(-2 - exponent)
        return (torch.where(codes > _MANTISSA, -size, size) if signed else size).to(dtype)

    def without_data(self, name: str) -> torch.Tensor:
        """See `LazyTensors.without_data`."""
        return torch.empty(self._specs[name].shape, dtype=self._specs[name].dtype, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class _Loader(BaseModelLoader):  # type: ignore[misc]  # vLLM is untyped to us
    """vLLM's ordinary loading, of values instead of files."""

    def __init__(self, load_config: LoadConfig, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(load_config)
        self._values = values
        self.views: list[LeftBehind] = []

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """As vLLM's own loaders."""
        del model_config
        self.views = _views(model)
        model.load_weights(iter(self._values.items()))  # type: ignore[operator]


@dataclass
class FreshModel:
    """A model of this rank that was loaded by vLLM's ordinary loading."""

    model: torch.nn.Module
    config: Any
    """The configuration that it belongs to."""
    left_behind: list[LeftBehind]
    """Tensors that were views of its parameters until it was loaded, and are not any more."""


def fresh_model(vllm_config: Any, values: Mapping[str, torch.Tensor]) -> FreshModel:
    """Build a model of this rank and load `values` into it. All tensor-parallel ranks call this together.

    Memory that nothing is loaded into holds a pattern.

    Raises:
        Exception: What vLLM raised.
    """
    config = copy.copy(vllm_config)
    # Layers are registered there by name, and the serving model's have the same names.
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    loader = _Loader(config.load_config, values)
    with set_current_vllm_config(config), torch.random.fork_rng(), Patterned():  # type: ignore[no-untyped-call]
        model = loader.load_model(vllm_config=config, model_config=config.model_config)
    held = tensors_of(model)
    return FreshModel(model, config, [view for view in loader.views if not _is_view(view, held)])


def _views(model: torch.nn.Module) -> list[LeftBehind]:
    """Tensors that are views of parameters under another name, in a model that nothing was loaded into."""
    parameters = {tensor.untyped_storage()._cdata: name for name, tensor in model.named_parameters() if tensor.numel()}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [
        LeftBehind(name, parameters[storage], int(tensor.storage_offset()), tensor.stride())
        for name, tensor in tensors_of(model).items()
        if name not in names and (storage := tensor.untyped_storage()._cdata) in parameters
    ]


def _is_view(view: LeftBehind, held: Mapping[str, torch.Tensor]) -> bool:
    """Whether it still is one, or is no longer there."""
    if view.view not in held or view.parameter not in held:
        return True
    return bool(held[view.view].untyped_storage()._cdata == held[view.parameter].untyped_storage()._cdata)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors that a model may compute from, by path: parameters, buffers, and tensors in whatever its layers keep."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        beside = {name: value for name, value in vars(module).items() if name not in _MODULE}
        for name, value in (*module._parameters.items(), *module._buffers.items(), *beside.items()):
            found.update(_reachable(f"{prefix}.{name}".lstrip("."), value, seen, _DEPTH))
    return found


def _reachable(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if path.endswith(_NO_WEIGHTS):
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif _is_part(value):
        inside = vars(value).items()
    if not inside or id(value) in seen or not depth:
        return
    seen.add(id(value))
    for name, item in list(inside):
        yield from _reachable(f"{path}.{name}", item, seen, depth - 1)


def _is_part(value: Any) -> bool:
    """Whether it is an object of vLLM's that belongs to a layer: an attention's implementation, a kernel, a method."""
    module = type(value).__module__
    return (
        hasattr(value, "__dict__")
        and module.startswith("vllm.")
        and not module.startswith("vllm.config")
        and not isinstance(value, torch.nn.Module | type)
    )


def digests(model: torch.nn.Module) -> dict[str, str]:
    """For each of `tensors_of`, a digest of its shape, strides, type and every bit."""
    return {name: _digest(tensor) for name, tensor in tensors_of(model).items()}


def _digest(tensor: torch.Tensor) -> str:
    looks = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device.type}"
    if tensor.is_meta or not tensor.numel():
        return looks
    return f"{looks} {sums(raw_bytes(tensor.detach().contiguous()).clone())}"


def looks(model: torch.nn.Module) -> dict[str, str]:
    """For each of `tensors_of`, how it lies in memory and whose memory that is; not its values."""
    owners: dict[int, str] = {}
    found = {}
    for name, tensor in tensors_of(model).items():
        owner = owners.setdefault(tensor.untyped_storage()._cdata, name) if tensor.numel() else name
        found[name] = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype} in {owner}"
    return found


@contextmanager
def room_beside(model: torch.nn.Module, device: torch.device, *, may_move: bool) -> Iterator[None]:
    """Inside, there is device memory for a second model: the weights of `model` wait in the host's memory if they `may_move`.

    Raises:
        ConfigError: The device has no room, and they may not.
        RuntimeError: The host has no room for them.
    """
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()
        for tensor in tensors_of(model).values()
        if tensor.device.type == device.type
    }
    nbytes = sum(storage.nbytes() for storage in storages.values())
    if device.type == "cpu" or torch.accelerator.get_memory_info(device)[0] > nbytes * _ROOM:
        yield
        return
    if not may_move:
        raise ConfigError(
            f"a second model of {nbytes / 1e9:.1f} GB has no room on {device} beside this one, which serves.",
            part="rehearsal",
            hint="Versions of other tensors or types come than when the replica was started; send what it was started with.",
        )
    with set_aside(list(storages.values())):
        torch.accelerator.empty_cache()
        try:
            yield
        finally:
            gc.collect()
            torch.accelerator.empty_cache()


@contextmanager
def set_aside(storages: list[torch.UntypedStorage]) -> Iterator[None]:
    """Inside, these storages take no device memory; afterwards they have the bytes that they had, for all who view them.

    Raises:
        RuntimeError: The host has no room for them; nothing has changed.
        LostWeightsError: They could not be put back.
    """
    kept = []
    for storage in storages:
        values = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        kept.append((storage, storage.nbytes(), values.copy_(storage)))
    try:
        for storage, _, _ in kept:
            storage.resize_(0)
        yield
    finally:
        try:
            for storage, nbytes, values in kept:
                storage.resize_(nbytes)
                storage.copy_(values)
        except Exception as cause:
            raise LostWeightsError(f"the model's weights could not be put back on their device: {cause}") from cause


class LostWeightsError(BaseException):
    """A model has no weights any more. No `Exception`, since its process must not go on."""
