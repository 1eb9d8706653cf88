"""`VersionReceiver`: receives the versions of a rollout rank, into staging memory, as deltas, or into the live weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, ReceiverLink
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime
from weightlane.plugins import RunHooks

from ..codecs.delta.decoding import DeltaDecoding
from ..codecs.delta.staged_delta import StagedDelta
from .bucket_sinks import DeltaBuckets, LiveBuckets, StagedBuckets, ViewedBuckets
from .receive_loop import ReceiveLoop, StageRequest
from .receive_session import ReceiveSession
from .staged_version import ViewedVersion, new_receive_memory
from .staging import LiveIdentity, Staging

_RELEASE_S = 5.0
"""Time limit for releasing a sender's memory, in seconds. It is short, because the sender soon allocates other memory instead."""


class VersionReceiver:
    """Receives one version after another for participant `name`, into memory on `device`. Used by the rank's staging thread.

    `live` is the runtime of the live model's device.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        live: DeviceRuntime,
        staging: Staging,
        live_identity: LiveIdentity,
        hooks: RunHooks,
    ) -> None:
        self._name = name
        self._device = device
        self._live = live
        self._staging = staging
        self._live_identity = live_identity
        self._loop = ReceiveLoop(name, device, hooks)
        self._decoding_stream = live.stream_for(self)
        self._live_buffer = torch.empty(0, dtype=torch.uint8, device=device)
        """Memory for one bucket of each sender, for versions that are committed in place."""
        self._viewed: dict[int, ReceiveSession] = {}
        """Sessions of the versions that are viewed in their senders' memory, by version."""

    def receive(self, request: StageRequest) -> Callable[[], None]:
        """Receive and verify a version. Returns the call that stages it.

        Raises as `ReceiveLoop.receive`, and the error of decoding or of `request.stream`.
        """
        manifest, stream, staging = request.manifest, request.stream, self._staging
        if request.viewed:
            self._note_viewed(manifest.version, request.session)
        if stream is not None:
            self._loop.receive(request, LiveBuckets(stream, {} if request.viewed else self._buffers(request)))
            stream.announce()  # a version without buckets is ready, too
            return stream.finish
        if manifest.is_delta:
            delta = self._receive_delta(request)
            if request.prepare_delta is None:
                return partial(staging.apply, delta)
            return partial(self._live_identity.stage_delta, manifest.version, delta)
        if request.viewed:
            buckets = ViewedBuckets()
            self._loop.receive(request, buckets)
            if (viewed := ViewedVersion.of(manifest, buckets.views)) is not None:
                return partial(staging.complete_viewed, viewed)
            memory = staging.memory(manifest)
            for index, view in buckets.views.items():
                start, stop = manifest.window(index)
                memory[start:stop].copy_(view)
        else:
            self._loop.receive(request, StagedBuckets(staging.memory(manifest)))
        return partial(staging.complete, manifest)

    def _receive_delta(self, request: StageRequest) -> Any:
        """Decode each segment of a delta while later buckets are in flight. Returns the prepared delta."""
        prepare = request.prepare_delta or StagedDelta.of
        # A prepared delta may be on the live model's device, also if buckets are received on another one.
        decoding = DeltaDecoding(
            request.manifest, prepare, request.deadline, self._name, self._live, self._decoding_stream
        )
        try:
            self._loop.receive(request, DeltaBuckets(decoding, self._device))
        except Exception as error:
            decoding.give_up(error)
            raise
        return decoding.result()

    def _buffers(self, request: StageRequest) -> dict[tuple[ReceiverLink, str], torch.Tensor]:
        """One buffer for each pair of sender and link: an engine that can only broadcast has several links between two ranks."""
        senders = [(source.link, sender) for source in request.session.sources for sender in source.hops]
        nbytes = request.manifest.largest_bucket_bytes
        if self._live_buffer.numel() < nbytes * len(senders):
            self.free_buffer()  # before the new memory is allocated
            self._live_buffer = new_receive_memory(nbytes * len(senders), self._device, self._live)
        return {sender: self._live_buffer[number * nbytes :] for number, sender in enumerate(senders)}

    def _note_viewed(self, version: int, session: ReceiveSession) -> None:
        # Views of older sessions cannot be released: their senders have allocated other memory.
        self._viewed = {viewed: other for viewed, other in self._viewed.items() if other.name == session.name}
        self._viewed[version] = session

    def release(self, version: int) -> None:
        """Release the memory of a viewed `version` to its senders. Raises the engine's error."""
        session = self._viewed.pop(version, None)
        for source in session.sources if session is not None else ():
            source.link.release(version, Deadline.after(_RELEASE_S))

    def free_buffer(self) -> None:
        """Free the memory kept between versions."""
        self._live_buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
