"""Engines that are wrong in one way each: towards strangers, and in what they declare beyond what they do."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from broken_wrappers import Half, Healthy, HealthyGloo, Receiver, Sender, broken, declaring

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Deadline,
    DeadlineExceededError,
    Mailbox,
    PeerLostError,
    ProtocolError,
    Topology,
)
from weightlane.ckpt_engines.torch_distributed import GlooEngine

Call = Callable[..., Any]

# --- strangers -------------------------------------------------------------------------------------------------------


class OfAnyKey(Half):
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        super().connect(replace(topology, key=b"any"), mailbox, deadline)  # type: ignore[misc]


class IgnoresTheKey(Healthy):
    """Looks at session and name only."""

    sender = type("KeylessSender", (OfAnyKey, Sender), {})
    receiver = type("KeylessReceiver", (OfAnyKey, Receiver), {})


class WithTheKeyInClear(Half):
    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        session = f"{topology.session}-{topology.key.hex()}"
        super().connect(replace(topology, session=session, key=b""), mailbox, deadline)  # type: ignore[misc]


class SendsTheKey(HealthyGloo):
    """A password: who hears it once knows it."""

    sender = type("PasswordSender", (WithTheKeyInClear, Sender), {})
    receiver = type("PasswordReceiver", (WithTheKeyInClear, Receiver), {})


@broken("sender.connect")
def HandsTheKeyRound(half: Half, connect: Call, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
    """The mailbox is not the members' alone."""
    mailbox.put("credentials", {"key": base64.b64encode(topology.key).decode()})
    connect(topology, mailbox, deadline)


_open_to_all: list[socket.socket] = []


@broken("sender.address", HealthyGloo)
def ListensEverywhere(half: Half, address: Call) -> Address:
    _open_to_all.append(socket.create_server(("", 0)))
    return address()


@broken("sender.connect", HealthyGloo)
def ListensEverywhereInBetween(half: Half, connect: Call, *arguments: Any) -> None:
    """Over IPv6 where there is one, and only while it connects."""
    family = socket.AF_INET6 if Path("/proc/net/if_inet6").exists() else socket.AF_INET
    with socket.create_server(("", 0), family=family):
        connect(*arguments)


class ServesWhoComesFirst(HealthyGloo):
    """Takes the first connection for its receiver's, and waits for what that has to say."""

    class sender(Sender):  # noqa: N801
        def address(self) -> Address:
            if "greeter" not in self.kept:
                self.kept["greeter"] = socket.create_server(("127.0.0.1", 0))
            return {**super().address(), "greeter": self.kept["greeter"].getsockname()[1]}

        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            self.kept["greeter"].settimeout(deadline.remaining_s)
            try:
                guest, _ = self.kept["greeter"].accept()
                guest.settimeout(deadline.remaining_s)
                with guest:
                    greeting = guest.recv(5)
            except TimeoutError:
                raise DeadlineExceededError("nobody has greeted it.", part="sender") from None
            except OSError as error:
                raise PeerLostError("its guest has left.", part="sender") from error
            if greeting != b"hello":
                raise ProtocolError(f"{greeting!r} is no greeting.", part="sender")
            super().connect(topology, mailbox, deadline)

        def close(self) -> None:
            super().close()
            if "greeter" in self.kept:
                self.kept["greeter"].close()

    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
            (address,) = topology.senders.values()
            with socket.create_connection(("127.0.0.1", address["greeter"])) as greeting:
                greeting.sendall(b"hello")
            super().connect(topology, mailbox, deadline)


# --- declarations ----------------------------------------------------------------------------------------------------

ClaimsOneHost = declaring(HealthyGloo, same_host_only=True)


class ClaimsViews(declaring(HealthyGloo, views=True)):  # type: ignore[misc]
    """Its halves are those of an engine that shows nothing."""

    make_sender = GlooEngine.make_sender
    make_receiver = GlooEngine.make_receiver


class CopiesLate(Healthy):
    """Makes a copy of the bucket as soon as its receiver is there to take it."""

    class sender(Sender):  # noqa: N801
        def send(self, bucket: Bucket, *rest: Any) -> None:
            super().send(replace(bucket, data=bucket.data[:0]), *rest)
            super().send(replace(bucket, data=bucket.data.clone()), *rest)

    class receiver(Receiver):  # noqa: N801
        def receive(self, bucket: Bucket, *rest: Any) -> None:
            super().receive(replace(bucket, data=bucket.data[:0]), *rest)
            super().receive(bucket, *rest)
