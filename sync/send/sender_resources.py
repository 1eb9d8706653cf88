"""`SenderResources`: the state and resources of one trainer rank's sending end that outlive its sessions."""

from __future__ import annotations

from weightlane.ckpt_engines import CheckpointEngine, Delivery
from weightlane.ckpt_engines.contract.engine import engine_label
from weightlane.ckpt_engines.links.buffer_device import buffer_device
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.plugins import RunHooks

from ..codecs.codec_choice import CodecChooser
from ..codecs.delta.encoding import DeltaEncoder
from ..config import CodecPolicy, Relay
from ..control.messages import EngineTraits
from ..plan.routes import check_relay
from .contribution import Contribution
from .snapshot.send_memory import PackingBuffers, SendMemory
from .snapshot.slots import SnapshotSlots


class SenderResources:
    """One trainer rank's engine, contribution, codec and memory. For the arguments see `Publisher`.

    Raises:
        ConfigError: The engine cannot send the parameters' memory, or its receivers cannot relay.
        StorageError: There is no room for a snapshot.
    """

    def __init__(
        self,
        name: str,
        engine: CheckpointEngine,
        contribution: Contribution,
        *,
        codec: CodecPolicy,
        full_every: int,
        relay: Relay,
        deadline_s: float,
        hooks: RunHooks,
    ) -> None:
        self.name, self.engine, self.contribution, self.hooks = name, engine, contribution, hooks
        self.number, self.deadline_s = contribution.rank, deadline_s
        check_relay(relay, engine_label(engine), engine.capabilities)
        self.relay = relay
        self.device = buffer_device(engine, contribution.device, name)
        """Device of buckets and snapshots."""
        self.runtime = runtime_of(self.device)
        # If rank 0 gathers, the engine never reads a snapshot.
        owner = engine if contribution.stored_layout is None or contribution.alone else None
        nbytes, copied_from = contribution.snapshot_bytes, contribution.snapshot.runtime
        self.slots = SnapshotSlots(lambda: SendMemory(owner, nbytes, self.device, copied_from=copied_from), name)
        self.delta_memory = SendMemory(owner, 0, self.device)
        """Memory for the segments of the newest delta; it grows as needed."""
        self.buffers = PackingBuffers(engine, self.device)
        self.encoder = DeltaEncoder(contribution.slices, contribution.offsets)
        self.chooser = CodecChooser(codec, full_every)

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
        self.contribution.snapshot.close()
        self.slots.close()
        self.delta_memory.close()
        self.buffers.close()
