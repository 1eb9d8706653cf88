"""The part of NIXL that the engine uses: an agent, memory registered with it, and writes into a peer's memory."""

from __future__ import annotations

import base64
import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import PeerLostError, ProtocolError, TransportError, toolkit

_DRAM = "DRAM"
_CHUNK_BYTES = 32 << 20
"""Most bytes written at once: a write over shared memory blocks until it is done, and no deadline is checked meanwhile."""


def import_nixl() -> Any:
    """Import and return ``nixl._api``. Raises the errors of the import."""
    from nixl import _api as api  # noqa: PLC0415 - large, and not there on every machine

    if "NIXL_LOG_LEVEL" not in os.environ:  # its default is to log to standard output
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api


class Region:
    """Memory that is registered with an agent and kept alive."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.start = data.data_ptr()
        self.nbytes = data.numel()


class Memory(Region):
    """Page-aligned memory that belongs to the engine, to be registered.

    Args:
        nbytes: Size in bytes, at least 1.
    """

    _abandoned: ClassVar[list[mmap.mmap]] = []

    def __init__(self, nbytes: int) -> None:
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(torch.frombuffer(self._pages, dtype=torch.uint8))

    def abandon(self) -> None:
        """Give the pages back, but never use their addresses again, because a peer may still be writing there.

        Shared-memory transports write by address and ignore registration.
        """
        self._pages.madvise(mmap.MADV_DONTNEED)
        self._abandoned.append(self._pages)


class Agent:
    """One NIXL agent with the UCX backend.

    It runs without NIXL's progress thread, which keeps a core busy even when idle. Data moves in calls of `Write.done` and of
    `progress`.

    Args:
        net_devices: ``UCX_NET_DEVICES``.
        transports: ``UCX_TLS``.
        part: Name of the half for error messages.

    Raises:
        TransportError: UCX cannot work with these devices and transports.
    """

    def __init__(self, net_devices: str, transports: str, part: str) -> None:
        api = import_nixl()
        self._part = part
        self._memories: list[Memory] = []
        self._borrowed: list[Region] = []
        self._registrations: list[Any] = []
        self._known: dict[str, tuple[str, str]] = {}
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        settings = {"UCX_NET_DEVICES": net_devices, "UCX_TLS": transports}  # UCX reads them when an agent is made
        hint = "Look at the engine's options net_devices and transports."
        with toolkit.environment(settings), self._typed("start UCX", hint=hint):
            self._nixl = api.nixl_agent(f"weightlane-{secrets.token_hex(8)}", config)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of registered memory, valid until `close`."""
        memory = Memory(max(1, nbytes))
        self._register(memory)
        self._memories.append(memory)
        return memory.data[:nbytes]

    def borrow(self, memory: torch.Tensor) -> None:
        """Register `memory`, which the caller owns, unless it is registered. It is kept alive until `close`."""
        if not any(region.data is memory for region in self._borrowed):
            region = Region(memory)
            self._register(region)
            self._borrowed.append(region)

    def _register(self, region: Region) -> None:
        with self._typed(f"register {region.nbytes} bytes"):
            self._registrations.append(self._nixl.register_memory([(region.start, region.nbytes, 0, "")], _DRAM))

    def place(self, data: torch.Tensor) -> dict[str, Any]:
        """Return JSON data by which a peer's `write` finds `data`, memory of `allocate`."""
        with self._typed("describe its memory"):
            metadata = base64.b64encode(self._nixl.get_agent_metadata()).decode("ascii")
        return {"metadata": metadata, "start": data.data_ptr()}

    def write(self, source: torch.Tensor, peer: str, place: Mapping[str, Any]) -> Write:
        """Start to write `source`, registered memory, to the `place` of `peer`. Raises `ProtocolError` or `TransportError`."""
        metadata, start = place.get("metadata"), place.get("start")
        if not (isinstance(metadata, str) and isinstance(start, int) and start > 0):
            raise ProtocolError("the acknowledgement names no place to write to.", part=self._part, peer=peer)
        known, name = self._known.get(peer, ("", ""))
        if metadata != known:
            with self._typed("read the receiver's description of its memory", peer):
                name = _text(self._nixl.add_remote_agent(base64.b64decode(metadata, validate=True)))
            self._known[peer] = metadata, name

        def post(offset: int, nbytes: int) -> tuple[Any, str]:
            with self._typed("write", peer):
                local = self._nixl.get_xfer_descs([(source.data_ptr() + offset, nbytes, 0)], _DRAM)
                remote = self._nixl.get_xfer_descs([(start + offset, nbytes, 0)], _DRAM)
                handle = self._nixl.initialize_xfer("WRITE", local, remote, name)
                return handle, self._nixl.transfer(handle)

        return Write(self, post, source.numel(), peer)

    def state(self, handle: Any, peer: str) -> str:
        """Return a transfer's state: ``"DONE"``, ``"PROC"`` or ``"ERR"``. Raises `PeerLostError` or `TransportError`."""
        with self._typed("write", peer):
            return str(self._nixl.check_xfer_state(handle))

    def progress(self) -> None:
        """Let UCX serve the peers."""
        with self._typed("serve its peers"):
            self._nixl.get_new_notifs()

    def close(self, *, exposed: bool = False) -> None:
        """Unregister all memory and end the agent. `exposed` says that a peer may still be writing to the agent's memory."""
        for registration in self._registrations:
            with contextlib.suppress(Exception):
                self._nixl.deregister_memory(registration)
        if exposed:
            for memory in self._memories:
                memory.abandon()
        self._memories.clear()
        self._borrowed.clear()
        self._registrations.clear()
        del self._nixl

    @contextlib.contextmanager
    def _typed(self, action: str, peer: str = "", hint: str = "") -> Iterator[None]:
        """Turn NIXL's errors, which have no common base class, into weightlane's."""
        try:
            yield
        except Exception as error:
            text = f"NIXL could not {action}: {type(error).__name__}: {error}."
            kind = PeerLostError if type(error).__name__ == "nixlRemoteDisconnectError" else TransportError
            raise kind(text, part=self._part, peer=peer, hint=hint) from error


class Write:
    """The write of a bucket to one receiver, chunk by chunk. The receiver can read the bucket when it is ``done``.

    Args:
        agent: The writing agent.
        post: Starts to write a chunk, given by offset and size; returns the transfer and its state.
        nbytes: Size of the bucket.
        peer: The receiver.
    """

    def __init__(self, agent: Agent, post: Callable[[int, int], tuple[Any, str]], nbytes: int, peer: str) -> None:
        self._agent = agent
        self._post = post
        self._nbytes = nbytes
        self._peer = peer
        self._offset = 0
        self._handle: Any = None
        self._state = "DONE"

    def done(self) -> bool:
        """Start the next chunk when one is written, and return whether all chunks are written. Raises as `Agent.state`."""
        if self._state == "PROC":
            self._state = self._agent.state(self._handle, self._peer)
        if self._state == "ERR":
            raise TransportError("NIXL could not write.", part="nixl", peer=self._peer)
        if self._state != "DONE":
            return False
        self.release()
        if self._offset == self._nbytes:
            return True
        nbytes = min(_CHUNK_BYTES, self._nbytes - self._offset)
        self._handle, self._state = self._post(self._offset, nbytes)
        self._offset += nbytes
        return False

    def release(self) -> None:
        """Release the current chunk's transfer; a running one is cancelled. One that cannot be cancelled ends with the agent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.release()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
