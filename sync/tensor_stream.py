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
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CorruptBucketError,
    Deadline,
    ProtocolError,
    ReceiverLink,
    SenderLink,
    VersionFiles,
)

from .version.tensor_spec import dtype_name

HEADER_BYTES = 1 << 16
"""Size of a header: room for the names and shapes of several hundred tensors, and small beside a bucket of 32 MiB."""
_ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of this in their block, so that any dtype can be viewed there."""
_MOST_DESCRIBED_BYTES = HEADER_BYTES - 1024
"""Most bytes that the tensors of a block may take in its header."""
_CHECKSUM_CHARS = 16
_HOST = torch.device("cpu")


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


class TensorSender:
    """Sends tensors over `link`, from two buckets of memory: one is filled while the other is sent.

    Args:
        engine: Engine of `link`, which allocates the memory.
        link: Link that is connected to `receivers`.
        receivers: Names of all receivers.
        bucket_bytes: Largest bucket, a multiple of 64.
        timeout_s: Longest time, in seconds, that the receivers may take for a bucket.
    """

    def __init__(
        self, engine: CheckpointEngine, link: SenderLink, receivers: list[str], bucket_bytes: int, timeout_s: float
    ) -> None:
        self._link, self._receivers, self._bucket_bytes, self._timeout_s = link, receivers, bucket_bytes, timeout_s
        self._engine = engine
        self._memory = [engine.allocate(HEADER_BYTES + bucket_bytes, _HOST) for _ in range(2)]
        self._stores = engine.capabilities.persistent
        self._prefixes: list[bytes] = []
        """For engines that store versions: one for each bucket, empty since other tools cannot read these files."""
        self._index = 0
        self._sending: asyncio.Future[None] | None = None
        self._tensors: list[_Tensor] = []
        """The tensors in the block that is being filled."""
        self._filled, self._described_bytes = 0, 0
        self.sent_bytes = 0

    def free(self) -> None:
        """Free the memory of the buckets. Call it when the link is closed."""
        for memory in self._memory:
            self._engine.free(memory)

    async def send(self, weights: AsyncIterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Send all `weights`. Returns when every receiver has them; one that reads from a store may still be reading.

        A tensor may be changed as soon as the next one is requested. Raises the errors of `SenderLink.post` and
        `SenderLink.flush`, `ProtocolError` for a tensor whose name and shape do not fit in a header, and the errors of `weights`.
        The link is then closed, so that the receivers do not wait.
        """
        try:
            if self._stores:
                files = VersionFiles(version, self._prefixes, {})
                await asyncio.to_thread(self._link.open_version, files, Deadline.after(self._timeout_s))
            async for name, tensor in weights:
                await self._add(name, tensor, version)
            await self._end_block(version)
            await self._start(_Header(ends=True), version)
            await self._sent()
        except BaseException:
            self._link.close()
            with contextlib.suppress(Exception):
                await self._sent()
            raise

    async def _add(self, name: str, tensor: torch.Tensor, version: int) -> None:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        entry = _Tensor(
            name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), offset=_aligned(self._filled)
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
        if self._sending is not None:
            await self._sending

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
        self.sent_bytes += header.nbytes


class TensorReceiver:
    """Receives over `link` what a `TensorSender` sends.

    Args:
        link: Link that is connected to `sender`.
        sender: Name of the sender.
        timeout_s: Longest time, in seconds, to wait for a bucket.
    """

    def __init__(self, link: ReceiverLink, sender: str, timeout_s: float) -> None:
        self._link, self._sender, self._timeout_s = link, sender, timeout_s
        self._index = 0

    async def blocks(self, version: int) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yield the blocks of `version` as `next_block` returns them, and receive one ahead of the caller.

        The link is closed after an error, also when the caller stops early, so that the sender does not wait.
        """
        loop = asyncio.get_running_loop()
        ahead = loop.run_in_executor(None, self.next_block, version)
        try:
            while (block := await ahead) is not None:
                ahead = loop.run_in_executor(None, self.next_block, version)
                yield block
        except BaseException:
            self._link.close()
            await asyncio.gather(ahead, return_exceptions=True)
            raise

    def next_block(self, version: int) -> list[tuple[str, torch.Tensor]] | None:
        """Wait for the next block, and return its tensors by name; None at the end of the version.

        The tensors share memory that is theirs alone. Raises `CorruptBucketError` if bytes changed on their way, `ProtocolError`,
        `PeerLostError`, `DeadlineExceededError`, `StorageError` or `ClosedError`.
        """
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


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _checksum(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(data.numpy().data)
