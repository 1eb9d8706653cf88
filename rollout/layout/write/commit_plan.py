"""One precomputed list of copies that puts a version into live parameters, and the same for single elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from weightlane.ckpt_engines import CommitError
from weightlane.sync.version.sliced_tensors import LazyTensors, without_data
from weightlane.sync.version.tensor_spec import raw_bytes

from ..map.geometry import Cover, blocks_between, target_block
from ..map.layout_map import Constant, LayoutMap, Slice, SourceSpec
from .host_copies import HostCopy, StagedCopies

_PART = "commit plan"
_Bits: TypeAlias = torch.dtype
_BITS: dict[int, _Bits] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Elements:
    """Some elements of one checkpoint tensor in one live parameter.

    Attributes:
        storage: Every element of the parameter's storage, of shape ``[storage elements]``.
        offsets: Where in it they are, int64 of shape ``[n]``, on the device of `storage`.
        chosen: Which of the positions asked for they are, int64 of shape ``[n]``, or a slice.
    """

    storage: torch.Tensor
    offsets: torch.Tensor
    chosen: torch.Tensor | slice

    def write(self, values: torch.Tensor) -> None:
        """Put ``values[chosen]`` there; `values` has one entry per position asked for."""
        self.storage.index_copy_(0, self.offsets, values[self.chosen].to(self.storage))

    def read(self, into: torch.Tensor) -> None:
        """The opposite of `write`: fill ``into[chosen]``."""
        into[self.chosen] = self.storage.index_select(0, self.offsets).to(into)


@dataclass(frozen=True, slots=True)
class _Copy:
    """One slice with the live memory it goes to."""

    piece: Slice
    live: torch.Tensor
    host: HostCopy | None
    """How it is copied from host memory; None where torch does it."""


class CommitPlan:
    """Commits versions into one rank's parameters.

    The parameters are looked up once, here: `moved` says whether a plan still holds. Not thread-safe.

    Args:
        layout: An accepted layout of `model`.
        model: The live model it was traced from.
    """

    def __init__(self, layout: LayoutMap, model: torch.nn.Module) -> None:
        self.layout = layout
        live = {name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._storages = {name: _whole_storage(live[name]) for name in layout.targets}
        self._places = _places(model, layout.targets)
        self._copies: dict[str, list[_Copy]] = defaultdict(list)
        for piece in layout.slices:
            storage = self._storages[piece.target]
            view = storage.as_strided(piece.shape, piece.target_strides, piece.target_offset)
            host = HostCopy.of(piece, layout.sources[piece.source], storage)
            self._copies[piece.source].append(_Copy(piece, view, host))
        placed = [(name, copy) for name, copies in self._copies.items() for copy in copies]
        self._on_host = [(name, copy.host) for name, copy in placed if copy.host is not None]
        self._by_torch = [(name, copy) for name, copy in placed if copy.host is None]
        self._alike: StagedCopies | None = None
        """How versions are copied that lie in memory like the last one."""
        self._fills = [
            (self._storages[item.target].as_strided(item.shape, item.strides, item.offset), item)
            for item in layout.constants
        ]

    @property
    def sources(self) -> Mapping[str, SourceSpec]:
        """The checkpoint tensors it commits, tensors that this rank uses nothing of included."""
        return self.layout.sources

    def moved(self) -> bool:
        """Whether a parameter has got other memory, so that the layout must be traced again."""
        return any(
            holder.get(name) is not tensor or tensor.data_ptr() != address
            for holder, name, tensor, address in self._places
        )

    @torch.no_grad()
    def commit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a version into the parameters.

        When this returns on a CUDA device, the copies are queued on the current stream.

        Args:
            tensors: Contiguous checkpoint tensors, at least those of `sources`, on the CPU or the parameters' device. Those that
                are made when asked for are made one at a time.

        Raises:
            CommitError: A tensor is missing or is not what was traced. Nothing has been copied.
        """
        alike = self._alike
        memory = alike.memory(tensors) if alike is not None and type(tensors) is dict else None
        if alike is not None and memory is not None:
            self.fill()
            alike.run(memory)
            _copy_all((copy.live, _value(copy.piece, tensors[name])) for name, copy in self._by_torch)
            return
        if isinstance(tensors, LazyTensors):
            for name, tensor in without_data(tensors).items():
                if name in self.sources:
                    self._checked(name, {name: tensor})  # raises before anything is copied
            if absent := self.sources.keys() - tensors.keys():
                raise CommitError(f"the version lacks {min(absent)}.", part=_PART)
            self.fill()
            for name in self._copies:
                _copy_all(self._copied_on_host(name, self._checked(name, tensors)))
            return
        checked = {name: self._checked(name, tensors) for name in self.sources}
        self.fill()
        _copy_all(pair for name, tensor in checked.items() for pair in self._copied_on_host(name, tensor))
        # Only a dict is sure to hold the tensors, so that no two of them were ever in one place.
        if type(tensors) is dict and all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors.values()):
            self._alike = StagedCopies(tensors, self._on_host)

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one checkpoint tensor into the parameters; raises as `commit`."""
        _copy_all(self._copied_on_host(name, self._checked(name, {name: tensor})))

    @torch.no_grad()
    def fill(self) -> None:
        """Write the constants, as `commit` does before it copies."""
        for live, constant in self._fills:
            live.fill_(constant.value)

    @torch.no_grad()
    def write_part(self, name: str, start: int, values: torch.Tensor) -> None:
        """Copy a run of one checkpoint tensor's elements into the parameters.

        On a CUDA device `values` may be used until the current stream has got there.

        Args:
            name: The checkpoint tensor.
            start: The first of them in the row-major flattened tensor.
            values: They themselves, 1-D, contiguous, in the type that was traced.

        Raises:
            CommitError: That is no part of what was traced. Nothing has been copied.
        """
        spec = self.sources.get(name)
        stop = start + values.numel()
        if spec is None or values.dtype != spec.dtype or values.ndim != 1 or not 0 <= start <= stop <= spec.numel:
            raise CommitError(f"elements {start} to {stop} of {name} do not go by copies.", part=_PART)
        pairs = []
        for copy in self._copies.get(name, ()):
            piece, storage = copy.piece, self._storages[copy.piece.target]
            for shape, source, target in blocks_between(piece, start, stop):
                value = values.as_strided(shape, piece.source_strides, values.storage_offset() + source - start)
                pairs.append((storage.as_strided(shape, piece.target_strides, target), value))
        _copy_all(pairs)

    @torch.no_grad()
    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Parameters that are not bit for bit what `commit` of `tensors` makes them. Raises as `commit`."""
        found = {
            copy.piece.target: None
            for name in self.sources  # one after the other: `tensors` may be made when they are asked for
            for tensor in [self._checked(name, tensors)]
            for copy in self._copies.get(name, ())
            if not _same_bits(copy.live, _value(copy.piece, tensor).to(copy.live))
        }
        for live, constant in self._fills:
            if self._stays(constant) and not _same_bits(live, torch.full_like(live, constant.value)):
                found[constant.target] = None
        return list(found)

    def locate(self, name: str, positions: torch.Tensor) -> list[Elements]:
        """Where elements of a checkpoint tensor live on this rank.

        Elements that other ranks own are in none of the results; one that is held twice here is in two. This is the larger part
        of the work of `scatter`, and may be done before the weights are to change.

        Args:
            name: The checkpoint tensor.
            positions: Strictly ascending element positions in it, int64 of shape ``[n]``.

        Raises:
            CommitError: The tensor does not go by copies, or the positions are not ascending positions in it.
        """
        spec = self.sources.get(name)
        if spec is None:
            raise CommitError(f"{name} does not go by copies.", part=_PART, hint="Send it whole, in a dense version.")
        if positions.numel():
            first, last = positions[0].item(), positions[-1].item()
            if first < 0 or last >= spec.numel or bool((positions[1:] <= positions[:-1]).any()):
                raise CommitError(
                    f"positions in {name} are not ascending, or not between 0 and {spec.numel - 1}.", part=_PART
                )
        found = [_located(copy.piece, self._storages[copy.piece.target], positions) for copy in self._copies[name]]
        return [elements for elements in found if elements.offsets.numel()]

    @torch.no_grad()
    def scatter(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Replace single elements of a checkpoint tensor.

        Args:
            name: The checkpoint tensor.
            positions: As for `locate`.
            values: What they become, of shape ``[n]``, in the type the tensor is sent in, or in the parameter's.

        Raises:
            CommitError: As `locate`, or there are not as many values. Nothing has changed.
        """
        _check_lengths(name, positions, values)
        for elements in self.locate(name, positions):
            elements.write(values)

    @torch.no_grad()
    def gather(self, name: str, positions: torch.Tensor) -> torch.Tensor:
        """The live elements at `positions` of a checkpoint tensor, of shape ``[n]``, in the parameter's type.

        Those that this rank has not are 0; `scatter` ignores them. Raises as `locate`.
        """
        found = self.locate(name, positions)
        return self._read(found, name, positions)

    @torch.no_grad()
    def swap(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`scatter`, returning what was there before as `gather` does: scattering that takes the change back bit for bit."""
        _check_lengths(name, positions, values)
        found = self.locate(name, positions)
        before = self._read(found, name, positions)
        for elements in found:
            elements.write(values)
        return before

    def _stays(self, constant: Constant) -> bool:
        """Whether nothing is copied over any of it."""
        block = constant.offset, constant.strides, constant.shape
        copies = [target_block(piece) for piece in self.layout.slices if piece.target == constant.target]
        cover = Cover([block, *copies])
        for copy in copies:
            cover.add(copy)
        return not bool(cover.view(block).any())

    def _read(self, found: Iterable[Elements], name: str, positions: torch.Tensor) -> torch.Tensor:
        held = self._copies.get(name)
        like = held[0].live if held else torch.empty(0, dtype=self.sources[name].dtype)
        result = torch.zeros(positions.numel(), dtype=like.dtype, device=like.device)
        for elements in found:
            elements.read(result)
        return result

    def _checked(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor of that name, if it is what was traced."""
        spec, tensor = self.sources.get(name), tensors.get(name)
        if spec is None:
            raise CommitError(f"{name} does not go by copies.", part=_PART)
        if tensor is None:
            raise CommitError(f"the version lacks {name}.", part=_PART)
        if tensor.shape != spec.shape or tensor.dtype is not spec.dtype or not tensor.is_contiguous():
            raise CommitError(
                f"{name} came as {tensor.dtype} of shape {tuple(tensor.shape)}, {spec.dtype} {spec.shape} was traced.",
                part=_PART,
            )
        return tensor

    def _copied_on_host(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy what libc can copy, and return what is left: where to, and what."""
        copies = self._copies.get(name, ())
        if tensor.is_cpu:
            memory = raw_bytes(tensor)
            for copy in copies:
                if copy.host is not None:
                    copy.host.run(memory)
            copies = [copy for copy in copies if copy.host is None]
        return [(copy.live, _value(copy.piece, tensor)) for copy in copies]


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first."""
    on_device: dict[tuple[torch.dtype, torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for live, value in pairs:
        if live.device.type == "cpu":
            live.copy_(value)
        else:
            key = live.dtype, value.dtype, value.device
            on_device.setdefault(key, []).append((live, value))
    # One launch per group in place of one per copy, on the stream that the model computes on.
    for group in on_device.values():
        torch._foreach_copy_([live for live, _ in group], [value for _, value in group], non_blocking=True)


def _located(piece: Slice, storage: torch.Tensor, positions: torch.Tensor) -> Elements:
    """The part of ascending `positions` that lies in `piece`. The source strides of a slice are a mixed radix."""
    last = piece.source_offset + sum(
        (length - 1) * step for length, step in zip(piece.shape, piece.source_strides, strict=True)
    )
    bounds = torch.tensor([piece.source_offset, last + 1], device=positions.device)
    low, high = torch.searchsorted(positions, bounds).tolist()
    rest = positions[low:high] - piece.source_offset
    if piece.source_strides == (1,):
        offsets = rest * piece.target_strides[0] + piece.target_offset
        return Elements(storage, offsets.to(storage.device), slice(low, high))
    offsets = torch.full_like(rest, piece.target_offset)
    inside: torch.Tensor | None = None
    order = sorted(zip(piece.source_strides, piece.shape, piece.target_strides, strict=True), reverse=True)
    for step, length, stride in order:
        index = rest if step == 1 else rest.div(step, rounding_mode="floor")
        rest = torch.zeros_like(rest) if step == 1 else rest - index * step
        offsets += index * stride
        fits = index < length
        inside = fits if inside is None else inside & fits
    assert inside is not None, "a slice has a dimension"
    chosen = (inside & (rest == 0)).nonzero().flatten()
    return Elements(storage, offsets[chosen].to(storage.device), (chosen + low).to(storage.device))


def _check_lengths(name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
    if positions.shape != values.shape or positions.ndim != 1:
        raise CommitError(f"{positions.numel()} positions in {name} came with {values.numel()} values.", part=_PART)


def _value(piece: Slice, tensor: torch.Tensor) -> torch.Tensor:
    """What is copied of a contiguous tensor, as a view."""
    return tensor.as_strided(piece.shape, piece.source_strides, tensor.storage_offset() + piece.source_offset)


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((count,), (1,), 0)


def _places(
    model: torch.nn.Module, names: Iterable[str]
) -> list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int]]:
    """Where each of `names` is registered, as what, and at which address: looked through in microseconds."""
    places: list[tuple[Mapping[str, torch.Tensor | None], str, torch.Tensor, int]] = []
    for full in names:
        prefix, _, name = full.rpartition(".")
        module = model.get_submodule(prefix)
        holder = module._parameters if name in module._parameters else module._buffers
        tensor = holder[name]
        assert tensor is not None, "it was traced"
        places.append((holder, name, tensor, tensor.data_ptr()))
    return places


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits))
