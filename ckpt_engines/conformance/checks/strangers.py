"""Checks that a process outside the session can neither join nor disturb it."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ...contract.capabilities import Capabilities
from ...errors import DeadlineExceededError, ProtocolError, TransportError, WeightlaneError
from ..processes.connection import Connection, waits_for_receivers
from ..processes.network import ListeningSocket, Recorder, Strangers, listeners, rerouted
from ..processes.payload import Parcel
from .base import ConformanceBase, ConnectionMaker

_WILDCARDS = {"0.0.0.0", "::"}  # noqa: S104 - looked for
_OTHER_KEY = "ab" * 32


class StrangerChecks(ConformanceBase):
    """Checks of keys, ports and connections from outside the session."""

    def test_a_receiver_without_the_key_is_not_let_in(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The receiver knows address, session and name, which are sent in clear, but not the key."""
        self.needs_waiting_sender(capabilities)
        connection = halves(1).exchange_addresses()
        (receiver,) = connection.receivers
        connection.start_connect(connection.sender, self.expiring_s)
        connection.topology = {**connection.topology, "key": _OTHER_KEY}
        connection.start_connect(receiver, self.expiring_s)
        within_s = self.in_time(self.expiring_s)
        self.failure(receiver, ProtocolError, TransportError, DeadlineExceededError, between_s=within_s)
        self.failure(connection.sender, WeightlaneError, between_s=within_s)

    def test_the_key_never_goes_over_the_wire(self, halves: ConnectionMaker) -> None:
        """The bytes through the addresses' ports contain the key neither as it is nor in hexadecimal or base64."""
        connection = halves(1).exchange_addresses()
        with contextlib.ExitStack() as stack:
            try:
                recorders = _put_recorders_between(connection, stack)
            except DeadlineExceededError:
                raise
            except WeightlaneError as error:  # an engine may authenticate addresses too
                pytest.skip(f"the halves do not connect through a proxy: {error}")
            connection.deliver([Parcel(1, 0, 1000, 1)])
            connection.close()
            streams = [bytes(stream) for recorder in recorders for stream in recorder.streams]
        if not any(streams):
            pytest.skip("the engine's addresses name no TCP port")
        form = _form_of_key(bytes.fromhex(connection.topology["key"]), streams)
        assert not form, f"expected a key that is never sent, it went over the wire {form}"

    def test_nothing_listens_on_every_interface(
        self, halves: ConnectionMaker, engine_options: Mapping[str, Any], capabilities: Capabilities
    ) -> None:
        """Halves listen on loopback unless an option says otherwise, because anyone who reaches a port can connect to it."""
        if _WILDCARDS & {str(option) for option in engine_options.values()}:
            pytest.skip("the options ask for every interface")
        connection = halves(1).exchange_addresses()
        self._expect_none_everywhere(connection, "after address()")
        if waits_for_receivers(capabilities):
            connection.start_connect(connection.sender)
            self.not_yet(connection.sender, self.settle_s, "its receiver connected")
            self._expect_none_everywhere(connection, "while the sender connects")
            connection.start_connect(connection.receivers[0])
            for half in connection.halves:
                half.result()
        else:
            for half in connection.halves:
                connection.start_connect(half)
                half.result()
        connection.deliver([Parcel(1, 0, 1000, 1)])
        self._expect_none_everywhere(connection, "when connected")

    @staticmethod
    def _expect_none_everywhere(connection: Connection, when: str) -> None:
        for half in connection.halves:
            open_to_all = [str(found.port) for found in listeners(half.pid) if found.everywhere]
            ports = ", ".join(sorted(open_to_all))
            assert not ports, f"expected no socket open on every interface {when}, {half.name} listens on port {ports}"

    @pytest.mark.parametrize("manner", ["silent", "garbage", "hanging up", "flood"])
    def test_strangers_neither_break_nor_delay_connect(
        self, halves: ConnectionMaker, capabilities: Capabilities, manner: str
    ) -> None:
        """Strangers connect to every listening socket as soon as it exists, before any receiver, and stay connected."""
        connection = halves(1).exchange_addresses()
        with Strangers(manner, [half.pid for half in connection.halves]) as strangers:
            connection.start_connect(connection.sender)
            if waits_for_receivers(capabilities):
                listening = any(listeners(half.pid) for half in connection.halves)
                strangers.wait(self.deadline_s / 2 if listening else self.settle_s)
            for receiver in connection.receivers:
                connection.start_connect(receiver)
            for half in connection.halves:
                try:
                    half.result()
                except Exception as error:
                    raise AssertionError(
                        f"expected {half.name} to connect beside strangers ({manner}), it raised"
                        f" {type(error).__name__}: {error}"
                    ) from error
        connection.deliver([Parcel(1, 0, 1000, 1)])
        if not strangers.visited:
            pytest.skip("no half listens on a socket that a stranger could reach")


def _put_recorders_between(connection: Connection, stack: contextlib.ExitStack) -> list[Recorder]:
    """Connect the halves through a recorder in front of every TCP port that an address names."""
    known, recorders = connection.topology, []
    shown: dict[str, Any] = {}
    for half, addresses in [(half, known["senders"]) for half in connection.senders] + [
        (half, known["receivers"]) for half in connection.receivers
    ]:
        ports: dict[int, int] = {}
        for found in _named(addresses[half.name], listeners(half.pid)):
            recorders.append(Recorder(found))
            stack.callback(recorders[-1].close)
            ports[found.port] = recorders[-1].port
        shown[half.name] = rerouted(addresses[half.name], ports)
    for half in connection.halves:
        connection.topology = {
            **known,
            **{
                side: {name: known[side][name] if name == half.name else shown[name] for name in known[side]}
                for side in ("senders", "receivers")
            },
        }
        connection.start_connect(half)
    for half in connection.halves:
        half.result()
    return recorders


def _named(address: Any, found: Iterable[ListeningSocket]) -> list[ListeningSocket]:
    """Return the TCP listeners whose port `address` names."""
    return [item for item in found if item.port and rerouted(address, {item.port: 0}) != address]


def _form_of_key(key: bytes, streams: Iterable[bytes]) -> str:
    """Return the form in which `key` occurs in a recorded stream; empty if it does not occur."""
    encoded = base64.b64encode(key).rstrip(b"=")
    forms = {
        "as it is": key,
        "in hexadecimal": key.hex().encode(),
        "in capital hexadecimal": key.hex().upper().encode(),
        "in base64": encoded,
        "in base64 for addresses": encoded.replace(b"+", b"-").replace(b"/", b"_"),
    }
    return next((form for form, text in forms.items() if any(text in stream for stream in streams)), "")
