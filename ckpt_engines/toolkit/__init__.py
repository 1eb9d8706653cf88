"""Helpers for authors of engines, so that only the transport is left to write.

All of them are public and optional, and the built-in engines are made of them. The framework opens and authenticates the
connections between the halves, gives the engine a `Channel` to each peer, and watches for the death of a peer
(`weightlane.ckpt_engines.links`).

- `PairedEngine` is a complete engine except for two functions that move one bucket: the shortest start for your own engine.
- `PairedSender` and `PairedReceiver` are its halves, for an engine whose halves keep state between two buckets.
- `PostingHalf` is the base of both: a `Lifecycle`, the channels, and the posted buckets, which `flush` moves in order.
- `Lifecycle` lets any thread close a half while another thread is blocked in it.
- `TcpSocketFactory` and `LocalSocketFactory` choose the sockets of halves (`CheckpointEngine.socket_factory`).
- `one_address` refuses wildcards, for the address on which a transport's own library listens.
- `announce`, `expect`, `acknowledge` and `await_acknowledgements` exchange messages about one bucket over the channels, for
  transports whose sides need them: where the bucket lies, or that it was read. `refuse` rejects an announced bucket.
- `send_payload` and `receive_payload` carry the bytes themselves over the channels, for transports without other connections.
- `EngineMemory` records the memory that an engine has allocated, so that its senders recognise a bucket that needs no copy.
- `run_bounded` makes a blocking library call end by the deadline, and `poll_until` waits for a library that must be polled.
- `environment` sets variables for a library that reads its settings from nowhere else.
- `runtime_of` gives streams and events of one device, for halves on an accelerator.
"""

from __future__ import annotations

from ..channels.channel import Channel
from ..channels.listener import listen_tcp, one_address
from ..channels.socket_factory import LocalSocketFactory, SocketFactory, TcpSocketFactory, host_and_port
from ..runtime.devices import DeviceRuntime, runtime_of
from ..runtime.environment import environment
from ..waits import Lifecycle, poll_until, run_bounded
from .bucket_messages import (
    acknowledge,
    announce,
    await_acknowledgements,
    choose,
    expect,
    receive_payload,
    refuse,
    send_payload,
)
from .engine_memory import EngineMemory
from .halves import PairedEngine, PairedReceiver, PairedSender, PostingHalf

__all__ = [
    "Channel",
    "DeviceRuntime",
    "EngineMemory",
    "Lifecycle",
    "LocalSocketFactory",
    "PairedEngine",
    "PairedReceiver",
    "PairedSender",
    "PostingHalf",
    "SocketFactory",
    "TcpSocketFactory",
    "acknowledge",
    "announce",
    "await_acknowledgements",
    "choose",
    "environment",
    "expect",
    "host_and_port",
    "listen_tcp",
    "one_address",
    "poll_until",
    "receive_payload",
    "refuse",
    "run_bounded",
    "runtime_of",
    "send_payload",
]
