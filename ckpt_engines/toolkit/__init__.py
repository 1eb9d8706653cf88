"""What engine authors need so that only the transport is left to write.

Everything here is public and optional: an engine may do without it, as long as it keeps the contract. The built-in engines
are made of the same parts. The connections between the halves, the proof that whoever is at the other end belongs to the session,
and the death of a peer are the framework's (`weightlane.ckpt_engines.links.link`): an engine gets a `Channel` to each peer.

- `PairedEngine` is a whole engine but for two functions that move one bucket: the shortest way to one of your own.
- `Lifecycle` makes a half that any thread may close while another one is blocked in it, and `PostedCalls` one whose buckets are
  moved one after the other when they are waited for.
- `TcpMeeting` and `LocalMeeting` say over which sockets halves are connected (`CheckpointEngine.meeting`).
- `announce`, `expect`, `acknowledge` and `await_acknowledgements` are messages over the channels about one bucket, for transports
  whose sides must tell each other something: where it lies, that it has been read. `refuse` says that an announcement cannot be
  followed.
- `send_payload` and `receive_payload` carry the bytes themselves over the channels, for transports without a wire of their own.
- `EngineMemory` remembers what an engine has allocated, so that its senders know a bucket that needs no copy.
- `run_bounded` makes a blocking library call end by the deadline, and `poll_until` waits for one that must be asked.
- `runtime_of` gives streams and events of one device, for halves on an accelerator.
"""

from __future__ import annotations

from ..channels.channel import Channel
from ..channels.listener import listen_tcp
from ..channels.meeting import LocalMeeting, Meeting, TcpMeeting, host_and_port
from ..runtime.devices import DeviceRuntime, runtime_of
from ..runtime.lifecycle import Lifecycle
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
from .paired import PairedEngine, PostedCalls
from .waiting import poll_until, run_bounded

__all__ = [
    "Channel",
    "DeviceRuntime",
    "EngineMemory",
    "Lifecycle",
    "LocalMeeting",
    "Meeting",
    "PairedEngine",
    "PostedCalls",
    "TcpMeeting",
    "acknowledge",
    "announce",
    "await_acknowledgements",
    "choose",
    "expect",
    "host_and_port",
    "listen_tcp",
    "poll_until",
    "receive_payload",
    "refuse",
    "run_bounded",
    "runtime_of",
    "send_payload",
]
