"""Tensors as a stream of buckets from one sender to its receivers, for frameworks that coordinate an update themselves.

The sender packs tensors into *blocks*. A block has several whole tensors and fits in one bucket, or has one larger tensor and is
sent in as many buckets as that takes. Ahead of each bucket of a block the sender sends a header, a bucket of `HEADER_BYTES`,
which says how many bytes follow, their checksum, and which tensors the block has. The last header says that the version ends.

The headers are buckets, and no messages on the links' control connections, because engines that store versions have no
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, TypeVar

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    ClosedError,
    CorruptBucketError,
    Deadline,
    ProtocolError,
    ReceiverLink,
    SenderLink,
    Topology,
    VersionFiles,
    WeightlaneError,
)

from .version.manifest import aligned
from .version.tensor_spec import dtype_name

HEADER_BYTES = 1 << 16
"""Size of a header: room for the names and shapes of several hundred tensors, and small beside a bucket of 32 MiB."""
_MOST_DESCRIBED_BYTES = HEADER_BYTES - 1024
"""Most bytes that the tensors of a block may take in its header."""
_CHECKSUM_CHARS = 16
_HOST = torch.device("cpu")
_Link = TypeVar("_Link", SenderLink, ReceiverLink)


class _Tensor(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    name: str
    dtype: str
    shape: list[NonNegativeInt]
    offset: NonNegativeInt
    """First byte in the block."""


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    block_bytes: NonNegativeInt = 0
    start: NonNegativeInt = 0
    """First byte of the block that the next bucket has."""
    nbytes: NonNegativeInt = 0
    """Bytes of the next bucket; 0 if none follows."""
    checksum: str = ""
    tensors: list[_Tensor] = []
    """Tensors of the block, in the header of its first bucket."""
    ends: bool = False
    """Whether the version ends here."""


class _StreamEnd(Generic[_Link]):
    """One end of a stream. It serves one connection: after an error, or `close`, another one takes its place."""

    def __init__(self, link: _Link, timeout_s: float) -> None:
        self._link: _Link = link
        self._timeout_s, self._connected = timeout_s, False

    def address(self) -> dict[str, Any]:
        """Return the address of this end for a topology, as JSON data."""
        return dict(self._link.address())

    def connect(self, topology: Topology) -> None:
        """Connect as the end with its name in `topology`. All ends call this at the same time.

        Raises `PeerLostError`, `ProtocolError`, `DeadlineExceededError`, or the engine's errors; it is closed then.
        """
        try:
            self._link.connect(topology, Deadline.after(self._timeout_s))
        except BaseException:
            self.close()
            raise
        self._connected = True

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connected = False
        self._link.close()

    def _require_connection(self) -> None:
        if not self._connected:
            hint = "All workers connect before they send or receive, and again after an error."
            raise ClosedError("it is not connected.", part=self._link.part, hint=hint)


class TensorSender(_StreamEnd[SenderLink]):
    """Sends tensors to all receivers of its topology, from two buckets of memory: one is filled while the other is sent.

    Args:
        name: Its name in the topology.
        engine: Engine of the transfer, which also allocates the memory.
        bucket_bytes: Largest bucket, a multiple of 64.
        timeout_s: Longest time, in seconds, to connect, and that the receivers may take for a bucket.
    """

    def __init__(self, name: str, engine: CheckpointEngine, bucket_bytes: int, timeout_s: float) -> None:
        super().__init__(SenderLink.of(engine, name, _HOST), timeout_s)
        self._engine, self._bucket_bytes = engine, bucket_bytes
        self._receivers: list[str] = []
        self._memory: list[torch.Tensor] = []
        self._stores = engine.capabilities.persistent
        self._prefixes: list[bytes] = []
        """For engines that store versions: one for each bucket, empty since other tools cannot read these files."""
        self._index = 0
        self._sending: asyncio.Future[None] | None = None
        self._tensors: list[_Tensor] = []
        """The tensors in the block that is being filled."""
        self._filled, self._described_bytes = 0, 0
        self._sent_bytes = 0

    def connect(self, topology: Topology) -> None:
        """See `_StreamEnd.connect`."""
        super().connect(topology)
        self._receivers = list(topology.receivers)
        self._memory = [self._engine.allocate(HEADER_BYTES + self._bucket_bytes, _HOST) for _ in range(2)]

    def close(self) -> None:
        """Close the connection and free the memory of the buckets. Idempotent."""
        super().close()
        memory, self._memory = self._memory, []
        for each in memory:
            self._engine.free(each)

    async def send(self, weights: AsyncIterator[tuple[str, torch.Tensor]], version: int) -> int:
        """Send all `weights`. Returns their bytes when every receiver has them; one that reads from a store may still be reading.

        A tensor may be changed as soon as the next one is requested. After an error it is closed, so that the receivers do not
        wait. If the transfer fails, the rest of `weights` is still iterated over: other processes may gather them with this one.

        Raises:
            PeerLostError: A receiver died, or failed and hung up.
            DeadlineExceededError: A receiver did not take a bucket in time.
            ClosedError: It is not connected.
            WeightlaneError: The engine failed, or the name and shape of a tensor do not fit in a header (`ProtocolError`).
        """
        self._require_connection()
        try:
            return await self._send_all(weights, version)
        except BaseException as error:
            self._link.close()
            try:
                with contextlib.suppress(Exception):
                    await self._sent()
            finally:
                self.close()
            if isinstance(error, WeightlaneError):
                async for _ in weights:
                    pass
            raise

    async def _send_all(self, weights: AsyncIterator[tuple[str, torch.Tensor]], version: int) -> int:
        self._sent_bytes = 0
        if self._stores:
            files = VersionFiles(version, self._prefixes, {})
            await asyncio.to_thread(self._link.open_version, files, Deadline.after(self._timeout_s))
        async for name, tensor in weights:
            await self._add(name, tensor, version)
        await self._end_block(version)
        await self._start(_Header(ends=True), version)
        await self._sent()
        return self._sent_bytes

    async def _add(self, name: str, tensor: torch.Tensor, version: int) -> None:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        entry = _Tensor(
            name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), offset=aligned(self._filled)
        )
        described = len(entry.model_dump_json().encode()) + 1
        if described > _MOST_DESCRIBED_BYTES:
            raise ProtocolError(f"the name and shape of a tensor take {described} bytes.", part=self._link.part)
        full = (
            entry.offset + content.numel() > self._bucket_bytes
            or self._described_bytes + described > _MOST_DESCRIBED_BYTES
        )
        if full and self._tensors:
            await self._end_block(version)
            entry = entry.model_copy(update={"offset": 0})
        self._tensors.append(entry)
        self._described_bytes += described
        if content.numel() <= self._bucket_bytes:
            self._filled = entry.offset + content.numel()
            self._payload[entry.offset : self._filled].copy_(content)
            return
        for start in range(0, content.numel(), self._bucket_bytes):
            part = content[start : start + self._bucket_bytes]
            self._payload[: part.numel()].copy_(part)
            header = _Header(block_bytes=content.numel(), start=start, nbytes=part.numel(), tensors=self._tensors)
            await self._start(header, version)
            self._tensors = []
        self._described_bytes = 0

    async def _end_block(self, version: int) -> None:
        if not self._tensors:
            return
        header = _Header(block_bytes=self._filled, nbytes=self._filled, tensors=self._tensors)
        await self._start(header, version)
        self._tensors, self._filled, self._described_bytes = [], 0, 0

    @property
    def _payload(self) -> torch.Tensor:
        return self._memory[0][HEADER_BYTES:]

    async def _start(self, header: _Header, version: int) -> None:
        """Start to send the memory that was filled, and turn to the other memory once that was sent."""
        await self._sent()
        # An executor begins at once; a task would wait until the trainer's generator lets the event loop run.
        loop = asyncio.get_running_loop()
        self._sending = loop.run_in_executor(None, self._send, self._memory[0], header, version)
        self._memory.reverse()

    async def _sent(self) -> None:
        """Wait until what was started last is sent, and raise its error."""
        if self._sending is None:
            return
        if not self._sending.done():  # else its event loop may be closed
            await asyncio.wait({self._sending})  # a cancelled task waits again: the thread reads the memory
        self._sending.result()

    def _send(self, memory: torch.Tensor, header: _Header, version: int) -> None:
        deadline = Deadline.after(self._timeout_s)
        payload = memory[HEADER_BYTES : HEADER_BYTES + header.nbytes]
        text = header.model_copy(update={"checksum": _checksum(payload)}).model_dump_json(exclude_defaults=True)
        encoded = f"{xxhash.xxh3_64_hexdigest(text)}{text}".encode().ljust(HEADER_BYTES)
        memory[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        for data in (memory[:HEADER_BYTES], payload) if header.nbytes else (memory[:HEADER_BYTES],):
            if self._stores:
                self._prefixes.append(b"")
            self._link.post(Bucket(version, self._index, data), self._receivers, deadline)
            self._index += 1
        self._link.flush(deadline)
        self._sent_bytes += header.nbytes


class TensorReceiver(_StreamEnd[ReceiverLink]):
    """Receives what the `TensorSender` of its topology sends.

    Args:
        name: Its name in the topology.
        engine: Engine of the transfer.
        timeout_s: Longest time, in seconds, to connect, and to wait for a bucket.
    """

    def __init__(self, name: str, engine: CheckpointEngine, timeout_s: float) -> None:
        super().__init__(ReceiverLink.of(engine, name, _HOST), timeout_s)
        self._sender = ""
        self._index = 0

    def connect(self, topology: Topology) -> None:
        """See `_StreamEnd.connect`. The topology has one sender."""
        (self._sender,) = topology.senders
        super().connect(topology)

    async def blocks(self, version: int) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield the blocks of `version` as `next_block` returns them, and receive one ahead of the caller.

        It is closed after an error, also when the caller stops early, so that the sender does not wait.
        """
        self._require_connection()
        loop = asyncio.get_running_loop()
        ahead = loop.run_in_executor(None, self.next_block, version)
        try:
            while (block := await ahead) is not None:
                ahead = loop.run_in_executor(None, self.next_block, version)
                yield block
        except BaseException:
            self.close()
            await asyncio.gather(ahead, return_exceptions=True)
            raise

    def next_block(self, version: int) -> list[tuple[str, torch.Tensor]] | None:
        """Wait for the next block, and return its tensors by name; None at the end of the version.

        The tensors share memory that is theirs alone. Raises `CorruptBucketError` if bytes changed on their way, `ProtocolError`,
        `PeerLostError`, `DeadlineExceededError`, `StorageError` or `ClosedError`.
        """
        self._require_connection()
        header = self._header(version)
        if header.ends:
            return None
        tensors, block, received = header.tensors, torch.empty(header.block_bytes, dtype=torch.uint8), 0
        while True:
            part = block[header.start : header.start + header.nbytes]
            if header.start != received or header.block_bytes != block.numel() or part.numel() != header.nbytes:
                raise ProtocolError("a bucket does not continue its block.", part=self._link.part, peer=self._sender)
            if part.numel():
                self._receive(part, version)
            if _checksum(part) != header.checksum:
                raise self._corrupt(version)
            received += part.numel()
            if received == block.numel():
                return [(entry.name, self._tensor(block, entry)) for entry in tensors]
            header = self._header(version)

    def _header(self, version: int) -> _Header:
        data = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._receive(data, version)
        text = data.numpy().tobytes().rstrip()
        checksum, text = text[:_CHECKSUM_CHARS], text[_CHECKSUM_CHARS:]
        if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
            raise self._corrupt(version)
        try:
            return _Header.model_validate_json(text)
        except ValidationError as error:
            message = f"a header is not valid: {error.errors()[0]['msg']}."
            raise ProtocolError(message, part=self._link.part, peer=self._sender) from None

    def _receive(self, data: torch.Tensor, version: int) -> None:
        deadline = Deadline.after(self._timeout_s)
        self._link.post(Bucket(version, self._index, data), self._sender, deadline)
        self._link.flush(deadline)
        self._index += 1

    def _tensor(self, block: torch.Tensor, entry: _Tensor) -> torch.Tensor:
        dtype: Any = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype):
            message = f"{entry.name} has the dtype {entry.dtype!r}, which this torch does not know."
            raise ProtocolError(message, part=self._link.part, peer=self._sender)
        nbytes = dtype.itemsize * torch.Size(entry.shape).numel()
        return block[entry.offset : entry.offset + nbytes].view(dtype).view(entry.shape)

    def _corrupt(self, version: int) -> CorruptBucketError:
        return CorruptBucketError(
            f"bucket {self._index - 1} of version {version} arrived with changed bytes.",
            part=self._link.part,
            peer=self._sender,
            hint="Its tensors are not used. If this repeats, suspect the transport or the memory of this host.",
        )


def _checksum(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(data.numpy().data)
