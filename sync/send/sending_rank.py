"""`SendingRank`: the slices that one trainer rank sends of every version, and its engine, snapshots and memory.

The memory is the engine's, and is kept across sessions: snapshots, packed buckets, and the segments of a delta.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock

import torch

from weightlane.ckpt_engines import CheckpointEngine, Delivery, ManifestError, StorageError
from weightlane.ckpt_engines.contract.engine import engine_label
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, buffer_device, runtime_of
from weightlane.plugins import RunHooks

from ..codecs.codec_choice import CodecChooser
from ..codecs.delta.encoding import DeltaEncoder
from ..codecs.quantised.quantisation import quantised_shares
from ..config import SyncConfig
from ..control.messages import EngineTraits
from ..plan import HolderMap
from ..plan.links import check_relay
from ..plan.session_plan import Supply
from ..version.manifest import CODEC_DENSE
from ..version.packing import SnapshotSlice, snapshot_slices
from ..version.placement import Placement
from ..version.tensor_spec import LocalShard, Shard, TensorSlice, parts_in
from .rank_agreement import ReplicatedShards
from .snapshot.places import compact_places, share_places, stream_places
from .snapshot.quantised_snapshot import quantised_slices, quantised_snapshot
from .snapshot.snapshot import Snapshot

_log = logging.getLogger(__name__)
PACKING_BUFFERS = 2
"""Most packed buckets in flight: one is packed while the engine sends the other."""


class SendMemory:
    """One contiguous allocation of the engine's memory; it is replaced if receivers may still read the old one.

    Args:
        engine: Allocates the memory; None for torch's allocator.
        nbytes: Size in bytes.
        device: Device of the memory.
        copied_from: Runtime of a device that copies into the memory, if this is host memory.
    """

    def __init__(
        self,
        engine: CheckpointEngine | None,
        nbytes: int,
        device: torch.device,
        *,
        copied_from: DeviceRuntime | None = None,
    ) -> None:
        self._engine = engine
        self._nbytes = nbytes
        self._device = device
        self._copied_from = copied_from if device == HOST else None
        self._registered: set[int] = set()
        """Addresses of registered memory."""
        self.data = self._new()
        """1-D uint8, `nbytes` long. Bytes that were never written are zero, so that gaps between tensors are always the same."""

    def _new(self) -> torch.Tensor:
        # Filled once: first-touch page faults would otherwise slow down the first version.
        if self._engine is None:
            data = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
        else:
            data = self._engine.allocate(self._nbytes, self._device).zero_()
        runtime_of(self._device).synchronize()  # other streams write to it, and do not wait for the zeros
        if self._copied_from and self._nbytes and self._copied_from.register_host(data.data_ptr(), self._nbytes):
            self._registered.add(data.data_ptr())
        return data

    def renew(self) -> None:
        """Replace the memory by other memory of the same size. Raises `StorageError` if there is none; it may be called again.

        If there is no room for both, the old memory is freed first.
        """
        try:
            new = self._new()
        except StorageError:
            self.close()
            new = self._new()
        old, self.data = self.data, new
        self._free(old)

    def grow(self, nbytes: int, *, exactly: bool = False) -> torch.Tensor:
        """Grow to at least `nbytes`, and a quarter more for slowly growing needs unless `exactly` is set. Returns `data`.

        If the memory has to grow, its content is lost. Raises `StorageError` if there is too little memory.
        """
        if self.data.numel() < nbytes:  # also if an earlier call found no memory
            self._nbytes = nbytes if exactly else nbytes + nbytes // 4
            self.renew()
        return self.data

    def close(self) -> None:
        """Free the memory; `data` is empty then. Idempotent."""
        old, self.data = self.data, self.data[:0].clone()
        if old.numel():
            self._free(old)

    def _free(self, old: torch.Tensor) -> None:
        if self._copied_from is not None and old.data_ptr() in self._registered:
            self._registered.discard(old.data_ptr())
            self._copied_from.unregister_host(old.data_ptr())
        if self._engine is not None:
            self._engine.free(old)


@dataclass(slots=True, eq=False)
class SnapshotSlot:
    """Memory for one snapshot."""

    memory: SendMemory
    exposed: set[tuple[str, int]] = field(default_factory=set)
    """Pairs of session and version in which receivers may read the memory in place."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """A version that serves, and its snapshot: the next delta applies to it."""

    key: tuple[int, int]
    """See `Publication.key`."""
    identity: str
    slot: SnapshotSlot


class SendingRank:
    """The slices of one trainer rank, and the engine, memory and snapshots with which it sends them, over all sessions.

    The assignment of slices to ranks depends only on the placements, so it is the same for all receivers. For the arguments and
    the errors see `Publisher`.

    Attributes:
        name: The publisher.
        number: The trainer rank.
        slices: The slices that this rank sends of a version.
        offsets: First byte of each of them in a snapshot.
        device: Device of buckets and snapshots.
    """

    def __init__(
        self,
        name: str,
        engine: CheckpointEngine,
        shards: Sequence[LocalShard],
        placements: Sequence[Placement],
        rank: int,
        config: SyncConfig,
        hooks: RunHooks,
    ) -> None:
        check_relay(config.relay, engine_label(engine), engine.capabilities)
        self.name, self.number, self.engine = name, rank, engine
        self.deadline_s, self.hooks = config.deadline_s, hooks
        self.stores = engine.capabilities.persistent
        self.alone = len(placements) == 1
        self.gathers = self.stores and not self.alone
        """Whether rank 0 sends the bytes of all ranks."""
        holdings = HolderMap.of({str(number): each for number, each in enumerate(placements)})
        replicated = holdings.replicated()
        self.replicated = ReplicatedShards(replicated, shards) if replicated else None
        """The slices that several ranks hold; None if there are none."""
        shares = holdings.assign()
        # In the order of a plan's stream, so that a snapshot that is read in place is the stream.
        turns = {name: turn for turn, name in enumerate(dict.fromkeys(_names(shares.values())))}
        own = sorted(_cut(shards, shares[str(rank)]), key=lambda shard: (turns[shard.spec.name], shard.starts))
        self.slices: Sequence[Shard] = own
        if config.quantised:
            shares = quantised_shares(shares)
            self.slices = quantised_slices(own)
        self._supply = Supply.of(shares, config)
        if not config.quantised:
            slices = [TensorSlice(spec, box) for spec, box in shares[str(rank)].slices]
            self.offsets = share_places(own, sorted(slices, key=lambda each: (turns[each.spec.name], each.box.starts)))
        else:
            self.offsets = compact_places(self.slices)
        if self.stores and self.alone:  # the snapshot is laid out as the stored stream, if possible
            self.offsets = stream_places(self.slices, self._supply.stored_layout) or self.offsets
        if config.quantised:
            self.snapshot = quantised_snapshot(own, self.slices, self.offsets)
        else:
            self.snapshot = Snapshot.of(own, self.offsets)
        self.device = buffer_device(
            engine.capabilities.devices, next((shard.data.device for shard in shards), None), name
        )
        self.runtime = runtime_of(self.device)
        owner = None if self.gathers else engine  # the engine never reads a snapshot that is gathered
        nbytes = self.snapshot.nbytes
        if self.stores and self.alone:
            nbytes = max(nbytes, self._supply.stored_layout.total_bytes)
        self._new_memory = partial(SendMemory, owner, nbytes, self.device, copied_from=self.snapshot.runtime)
        self._slots = [SnapshotSlot(self._new_memory())]
        """One slot, or two if the snapshot of the version that serves is kept as the base of deltas."""
        self._only_one = False
        """Whether there is memory for one slot only."""
        self.base: DeltaBase | None = None
        self.writing = Lock()
        """Held by a thread that writes to a snapshot after it was taken."""
        self.delta_memory = SendMemory(owner, 0, self.device)
        """Memory for the segments of the newest delta; it grows as needed."""
        self._packing: list[SendMemory] = []
        self.chooser = None if config.codec == CODEC_DENSE else CodecChooser(config.codec, config.full_every)
        """None if no version is a delta."""
        self.encoder = DeltaEncoder(self.slices, self.offsets)

    def free_slot(self) -> SnapshotSlot:
        """A slot for the next snapshot. It is not the base's slot, unless there is memory for one slot only."""
        base = self.base
        for slot in self._slots:
            if base is None or slot is not base.slot:
                return slot
        if not self._only_one:
            try:
                self._slots.append(SnapshotSlot(self._new_memory()))
            except StorageError as error:
                self._only_one = True
                _log.warning(
                    "%s sends every version in full: no memory to keep the base of a delta: %s", self.name, error
                )
        if self._only_one:
            self.base = None
        return self._slots[-1]

    def packing_buffers(self, nbytes: int) -> Sequence[torch.Tensor]:
        """Memory for packed buckets, 1-D uint8, each at least `nbytes` long, allocated when needed. Raises `StorageError`."""
        while len(self._packing) < PACKING_BUFFERS:
            self._packing.append(SendMemory(self.engine, 0, self.device))
        return [memory.grow(nbytes, exactly=True) for memory in self._packing]

    @property
    def numel(self) -> int:
        """Elements that this rank sends."""
        return sum(mine.numel for mine in self.slices)

    @property
    def quantises(self) -> bool:
        """Whether linear weights are quantised."""
        return bool(self._supply.quantised)

    def supply_of(self, publishers: Sequence[str]) -> Supply:
        """The slices that all `publishers` send, in rank order, for the session's plan."""
        return replace(self._supply, shares=dict(zip(publishers, self._supply.shares.values(), strict=True)))

    def parts_of_all(self, regions: Sequence[TensorSlice]) -> Iterator[list[SnapshotSlice]]:
        """For each trainer rank, the parts of its snapshot that a stream of `regions` contains. Rank 0 gathers them."""
        for number, share in enumerate(self._supply.shares.values()):
            theirs = [TensorSlice(spec, box) for spec, box in share.slices]
            slices, offsets = (self.slices, self.offsets) if number == self.number else (theirs, compact_places(theirs))
            yield snapshot_slices(slices, offsets, regions)

    @property
    def traits(self) -> EngineTraits | None:
        """The engine's traits on rank 0, which reports them for all ranks; None on the other ranks."""
        if self.number != 0:
            return None
        facts = self.engine.capabilities
        return EngineTraits(
            selective=not facts.delivery.isdisjoint({Delivery.POINT_TO_POINT, Delivery.STORE}),
            elastic=facts.elastic,
            persistent=facts.persistent,
        )

    def bucket_sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        """Report a sent bucket to the observers."""
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
        self.hooks.bucket_sent(version=version, index=index, facts=facts)

    def close(self) -> None:
        """Free all memory and end the threads. No thread may be reading the memory."""
        self.encoder.close()
        self.snapshot.close()
        self.base = None
        for slot in self._slots:
            slot.memory.close()
        self.delta_memory.close()
        for memory in self._packing:
            memory.close()


def _names(shares: Iterable[Placement]) -> Iterator[str]:
    return (spec.name for share in shares for spec in share.specs)


def _cut(shards: Sequence[LocalShard], share: Placement) -> list[LocalShard]:
    """The parts of `shards` that are in `share`. Raises `ManifestError` if elements are missing, or are there twice."""
    cut: list[LocalShard] = []
    for each, parts in parts_in([TensorSlice(spec, box) for spec, box in share.slices], shards):
        if left := each.numel - sum(part.numel for part in parts):
            wrong = f"{left} elements of {each.box} are missing" if left > 0 else f"shards of {each.box} overlap"
            raise ManifestError(
                f"{each.spec.name} is not held as its placement says: {wrong}.",
                part="publisher",
                hint="Give every rank the placements of all ranks' shards, in rank order.",
            )
        cut += parts
    return cut
