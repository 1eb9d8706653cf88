"""`CommitPlan`: a precomputed list of copies that writes a version into live parameters, and locates single elements in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError
from weightlane.sync.version.sliced_tensors import LazyTensors, without_data
from weightlane.sync.version.tensor_spec import INTEGERS, raw_bytes

from ..map.geometry import blocks_between
from ..map.layout_map import LayoutCopy, LayoutMap, SourceSpec
from .copy_list import HostCopy, StagedCopies

_PART = "commit plan"


@dataclass(frozen=True, slots=True)
class LiveElements:
    """Elements of one checkpoint tensor in one live parameter.

    Attributes:
        storage: Every element of the parameter's storage, of shape ``[storage elements]``.
        offsets: Offsets of the elements in `storage`, int64 of shape ``[n]``, on its device.
        chosen: Indices of the elements in the positions that were asked for, int64 of shape ``[n]``, or a slice.
    """

    storage: torch.Tensor
    offsets: torch.Tensor
    chosen: torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class _LiveCopy:
    """One copy with the live memory that it writes."""

    copy: LayoutCopy
    live: torch.Tensor
    host: HostCopy | None
    """The same copy by libc; None if torch has to make it."""

    def source_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a contiguous checkpoint tensor that are copied, as a view."""
        start = tensor.storage_offset() + self.copy.source_offset
        return tensor.as_strided(self.copy.shape, self.copy.source_strides, start)


class CommitPlan:
    """Commits versions into one rank's parameters.

    The parameters are looked up once, by the constructor: `moved` shows whether the plan is out of date. Not thread-safe.
    `layout` is an accepted layout of the live `model`.
    """

    def __init__(self, layout: LayoutMap, model: torch.nn.Module) -> None:
        self.layout = layout
        live = {name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._storages = {name: _whole_storage(live[name]) for name in layout.targets}
        self._addresses = _addresses(model, layout.targets)
        self._copies: dict[str, list[_LiveCopy]] = defaultdict(list)
        for copy in layout.copies:
            storage = self._storages[copy.target]
            view = storage.as_strided(copy.shape, copy.target_strides, copy.target_offset)
            host = HostCopy.of(copy, layout.sources[copy.source], storage)
            self._copies[copy.source].append(_LiveCopy(copy, view, host))
        named = [(name, copy) for name, copies in self._copies.items() for copy in copies]
        self._by_libc = [(name, copy.host) for name, copy in named if copy.host is not None]
        self._by_torch = [(name, copy) for name, copy in named if copy.host is None]
        self._staged: StagedCopies | None = None
        """Copies of versions that have the same arrangement in memory as the last one."""
        self._fills = [
            (self._storages[item.target].as_strided(item.shape, item.strides, item.offset), item)
            for item in layout.constants
        ]

    @property
    def sources(self) -> Mapping[str, SourceSpec]:
        """The checkpoint tensors of a version, including those that this rank does not use."""
        return self.layout.sources

    @property
    def keeps_sent_bits(self) -> bool:
        """Whether every live element that is no NaN tells the bits that were sent for it: no copy rounds."""
        return all(
            sent == live or (sent in (torch.bfloat16, torch.float16) and live is torch.float32)
            for sent, live in (
                (self.layout.sources[copy.source].dtype, self._storages[copy.target].dtype)
                for copy in self.layout.copies
            )
        )

    def moved(self) -> bool:
        """Whether a parameter has moved to other memory, so that the layout must be traced again."""
        return any(
            holder.get(name) is not tensor or tensor.data_ptr() != address
            for holder, name, tensor, address in self._addresses
        )

    @torch.no_grad()
    def commit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a version into the parameters. On a CUDA device they are queued on the current stream when this returns.

        Args:
            tensors: Contiguous checkpoint tensors, at least those of `sources`, on the CPU or the parameters' device. Lazy
                tensors are made one at a time.

        Raises:
            CommitError: A tensor is missing or is not what was traced. Nothing has been copied.
        """
        staged = self._staged
        memory = staged.memory(tensors) if staged is not None and type(tensors) is dict else None
        if staged is not None and memory is not None:
            self.fill()
            staged.run(memory)
            _copy_all((copy.live, copy.source_view(tensors[name])) for name, copy in self._by_torch)
            return
        specs = without_data(tensors)
        for name in self.sources:
            self._checked(name, specs)  # Raises before anything is copied.
        self.fill()
        if isinstance(tensors, LazyTensors):
            for name in self._copies:
                _copy_all(self._copy_by_libc(name, self._checked(name, tensors)))
            return
        _copy_all(pair for name in self._copies for pair in self._copy_by_libc(name, tensors[name]))
        # Only a dict keeps its tensors alive, so that no two of them shared an address.
        if type(tensors) is dict and all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors.values()):
            self._staged = StagedCopies(tensors, self._by_libc)

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants; `commit` does so before it copies."""
        for live, constant in self._fills:
            live.fill_(constant.value)

    @torch.no_grad()
    def write_elements(self, name: str, start: int, values: torch.Tensor) -> None:
        """Copy consecutive elements of one checkpoint tensor into the parameters.

        Args:
            name: The checkpoint tensor.
            start: Index of the first element in the row-major flattened tensor.
            values: The elements, 1-D, contiguous, in the dtype that was traced. On a CUDA device they must stay unchanged until
                the current stream has made the copies.

        Raises:
            CommitError: The elements are not part of what was traced. Nothing has been copied.
        """
        spec = self.sources.get(name)
        stop = start + values.numel()
        if spec is None or values.dtype != spec.dtype or values.ndim != 1 or not 0 <= start <= stop <= spec.numel:
            raise CommitError(f"elements {start} to {stop} of {name} do not go by copies.", part=_PART)
        pairs = []
        for copy in self._copies.get(name, ()):
            strided, storage = copy.copy, self._storages[copy.copy.target]
            for shape, source, target in blocks_between(strided, start, stop):
                value = values.as_strided(shape, strided.source_strides, values.storage_offset() + source - start)
                pairs.append((storage.as_strided(shape, strided.target_strides, target), value))
        _copy_all(pairs)

    def locate(self, name: str, positions: torch.Tensor) -> list[LiveElements]:
        """Find the live elements at `positions` of checkpoint tensor `name`: strictly ascending, int64 of shape ``[n]``.

        Elements that only other ranks have are in none of the results; an element that this rank has twice is in two.

        Raises:
            CommitError: The tensor does not go by copies, or the positions are not ascending positions in it.
        """
        spec = self.sources.get(name)
        if spec is None:
            raise CommitError(
                f"{name} does not go by copies.", part=_PART, hint="Send the whole tensor, in a full version."
            )
        if positions.numel():
            first, last = positions[0].item(), positions[-1].item()
            if first < 0 or last >= spec.numel or bool((positions[1:] <= positions[:-1]).any()):
                raise CommitError(
                    f"positions in {name} are not ascending, or not between 0 and {spec.numel - 1}.", part=_PART
                )
        found = [_located(copy.copy, self._storages[copy.copy.target], positions) for copy in self._copies[name]]
        return [elements for elements in found if elements.offsets.numel()]

    def _checked(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor `name`, if it has the shape and dtype that were traced."""
        spec, tensor = self.sources.get(name), tensors.get(name)
        if spec is None:
            raise CommitError(f"{name} does not go by copies.", part=_PART)
        if tensor is None:
            raise CommitError(f"the version lacks {name}.", part=_PART)
        if tensor.shape != spec.shape or tensor.dtype is not spec.dtype or not tensor.is_contiguous():
            raise CommitError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; {spec.dtype} of shape {spec.shape} was traced.",
                part=_PART,
            )
        return tensor

    def _copy_by_libc(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make the copies that libc can make, and return the others as pairs of live memory and values."""
        copies = self._copies.get(name, ())
        if tensor.is_cpu:
            memory = raw_bytes(tensor)
            for copy in copies:
                if copy.host is not None:
                    copy.host.run(memory)
            copies = [copy for copy in copies if copy.host is None]
        return [(copy.live, copy.source_view(tensor)) for copy in copies]


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    on_device: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for live, value in pairs:
        if live.device.type == "cpu":
            live.copy_(value)
        else:
            key = live.dtype, value.dtype, value.device
            on_device.setdefault(key, []).append((live, value))
    # One launch per group instead of one per copy, on the stream that the model computes on.
    for group in on_device.values():
        torch._foreach_copy_([live for live, _ in group], [value for _, value in group], non_blocking=True)


def _located(copy: LayoutCopy, storage: torch.Tensor, positions: torch.Tensor) -> LiveElements:
    """The part of ascending `positions` that `copy` reads. The source strides of a copy are a mixed radix."""
    last = copy.source_offset + sum(
        (length - 1) * step for length, step in zip(copy.shape, copy.source_strides, strict=True)
    )
    bounds = torch.tensor([copy.source_offset, last + 1], device=positions.device)
    low, high = torch.searchsorted(positions, bounds).tolist()
    rest = positions[low:high] - copy.source_offset
    if copy.source_strides == (1,):
        offsets = rest * copy.target_strides[0] + copy.target_offset
        return LiveElements(storage, offsets.to(storage.device), slice(low, high))
    offsets = torch.full_like(rest, copy.target_offset)
    inside: torch.Tensor | None = None
    order = sorted(zip(copy.source_strides, copy.shape, copy.target_strides, strict=True), reverse=True)
    for step, length, stride in order:
        index = rest if step == 1 else rest.div(step, rounding_mode="floor")
        rest = torch.zeros_like(rest) if step == 1 else rest - index * step
        offsets += index * stride
        fits = index < length
        inside = fits if inside is None else inside & fits
    assert inside is not None, "a copy has a dimension"
    chosen = (inside & (rest == 0)).nonzero().flatten()
    return LiveElements(storage, offsets[chosen].to(storage.device), (chosen + low).to(storage.device))


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((count,), (1,), 0)


def _addresses(
    model: torch.nn.Module, names: Iterable[str]
) -> list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int]]:
    """The module dictionary, name, tensor and address of each of `names`: cheap enough to compare on every commit."""
    found: list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int]] = []
    for full in names:
        prefix, _, name = full.rpartition(".")
        module = model.get_submodule(prefix)
        holder = module._parameters if name in module._parameters else module._buffers
        tensor = holder[name]
        assert tensor is not None, "it was traced"
        found.append((holder, name, tensor, tensor.data_ptr()))
    return found


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` as integers of the size of its elements."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])
