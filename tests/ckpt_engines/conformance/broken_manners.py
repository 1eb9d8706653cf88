"""Engines that are wrong in one way each: towards strangers, and in what they declare beyond what they do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from broken_wrappers import Call, Half, Healthy, HealthyGloo, Receiver, Sender, broken, broken_link, declaring

from weightlane.ckpt_engines import (
    Address,
    Bucket,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    Topology,
)
from weightlane.ckpt_engines.engines.torch_distributed.gloo import GlooEngine
from weightlane.ckpt_engines.links.receiver_link import ReceiverLink
from weightlane.ckpt_engines.links.sender_link import SenderLink

# --- strangers -------------------------------------------------------------------------------------------------------


def connecting_with(changed: Callable[[Topology], Topology]) -> tuple[type[SenderLink], type[ReceiverLink]]:
    """Links whose session is another than the one they were told of."""

    def connect(self: Any, topology: Topology, deadline: Deadline) -> None:
        super(type(self), self).connect(changed(topology), deadline)

    calls = {"connect": connect}
    return type("OtherSender", (SenderLink,), calls), type("OtherReceiver", (ReceiverLink,), calls)


class IgnoresTheKey(Healthy):
    """Looks at session and name only."""

    link_types = connecting_with(lambda topology: replace(topology, key=b"any"))


class SendsTheKey(HealthyGloo):
    """A password: who hears it once knows it."""

    link_types = connecting_with(
        lambda topology: replace(topology, session=f"{topology.session}-{topology.key.hex()}", key=b"")
    )


_open_to_all: list[socket.socket] = []


@broken("sender.address", HealthyGloo)
def ListensEverywhere(half: Half, address: Call) -> Address:
    _open_to_all.append(socket.create_server(("", 0)))
    return address()


@broken_link("sender.connect")
def ListensEverywhereInBetween(link: SenderLink, connect: Call, *arguments: Any) -> None:
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

        def connect(self, topology: Topology, channels: Any, deadline: Deadline) -> None:
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
            super().connect(topology, channels, deadline)

        def close(self) -> None:
            super().close()
            if "greeter" in self.kept:
                self.kept["greeter"].close()

    class receiver(Receiver):  # noqa: N801
        def connect(self, topology: Topology, channels: Any, deadline: Deadline) -> None:
            (address,) = topology.senders.values()
            with socket.create_connection(("127.0.0.1", address["greeter"])) as greeting:
                greeting.sendall(b"hello")
            super().connect(topology, channels, deadline)


# --- declarations ----------------------------------------------------------------------------------------------------

ClaimsOneHost = declaring(HealthyGloo, same_host_only=True)


class ClaimsViews(declaring(HealthyGloo, views=True)):  # type: ignore[misc]
    """Its halves are those of an engine that shows nothing."""

    make_sender = GlooEngine.make_sender
    make_receiver = GlooEngine.make_receiver


class InTwoSteps(Half):
    """Sends or receives an empty bucket ahead of each: who has that is there to take the next one."""

    def post(self, bucket: Bucket, peers: Any) -> None:
        self.kept.setdefault("posted", []).append((bucket, peers))

    def flush(self, deadline: Deadline, _pending: int = 0) -> None:
        for bucket, peers in self.kept.pop("posted", []):
            for step in (replace(bucket, data=bucket.data[:0]), self.taken(bucket)):
                super().post(step, peers)  # type: ignore[misc]
                super().flush(deadline, 0)  # type: ignore[misc]

    def taken(self, bucket: Bucket) -> Bucket:
        return bucket


class CopyingInTwoSteps(InTwoSteps):
    def taken(self, bucket: Bucket) -> Bucket:
        return replace(bucket, data=bucket.data.clone())


class CopiesLate(Healthy):
    """Makes a copy of the bucket as soon as its receiver is there to take it."""

    sender = type("LateSender", (CopyingInTwoSteps, Sender), {})
    receiver = type("PatientReceiver", (InTwoSteps, Receiver), {})
