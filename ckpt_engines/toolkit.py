"""What engine authors need so that only the transport is left to write.

Everything here is public and optional: an engine may do without it, as long as it keeps the contract. The built-in engines
are made of the same parts.

- `Lifecycle` makes a half that any thread may close while another one is blocked in it.
- `Door` (sender) and `dial_senders` (receiver) open one control connection per pair, a `Channel`, and let in only members of
  the session. They are made of `listen_tcp`, `accept_receivers` and `dial`, which also serve Unix sockets and other hosts.
- `announce`, `expect`, `acknowledge` and `await_acknowledgements` carry one bucket's handshake: both sides agree on version,
  index and size before the first byte, and the sender learns when its memory is free again. ``announce`` may carry more, for
  example where a receiver finds the bucket in registered memory.
- `send_payload` and `receive_payload` carry the bytes themselves over the channels, for transports without a wire of their own.
- `refuse` answers an announcement that cannot be followed, and `await_acknowledgements` can be told what else may be said between
  acknowledgements, such as that a version is released (`WeightReceiver.release`).
- `EngineMemory` remembers what an engine has allocated, so that its senders know a bucket that needs no copy.
- `run_bounded` makes a blocking library call end by the deadline, `poll_until` waits for one that must be polled, and
  `blame` finds out whether a library's error means that a peer is gone.

A sender's half of a bucket, with `send_payload` as the transport:

    with self._life.call():
        channels = choose(self._channels, receivers, self._life)
        announce(channels, bucket, deadline)
        send_payload(channels, bucket, deadline)
        await_acknowledgements(channels, bucket, deadline)

and the receiver's:

    with self._life.call():
        channel = choose(self._channels, [sender], self._life)[sender]
        expect(channel, bucket, deadline)
        receive_payload(channel, bucket, deadline)
        acknowledge(channel, bucket, deadline)
"""

from __future__ import annotations

from ._channel import Channel, accept_receivers, dial, listen_tcp
from ._engine_memory import EngineMemory
from ._handshake import (
    acknowledge,
    announce,
    await_acknowledgements,
    choose,
    expect,
    receive_payload,
    refuse,
    send_payload,
)
from ._lifecycle import Lifecycle
from ._meeting import Door, dial_senders, host_and_port, tcp_address
from ._waiting import blame, poll_until, run_bounded

__all__ = [
    "Channel",
    "Door",
    "EngineMemory",
    "Lifecycle",
    "accept_receivers",
    "acknowledge",
    "announce",
    "await_acknowledgements",
    "blame",
    "choose",
    "dial",
    "dial_senders",
    "expect",
    "host_and_port",
    "listen_tcp",
    "poll_until",
    "receive_payload",
    "refuse",
    "run_bounded",
    "send_payload",
    "tcp_address",
]
