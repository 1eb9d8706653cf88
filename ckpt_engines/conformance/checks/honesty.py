"""Checks that an engine has the abilities it declares: its classes, memory that is not copied, addresses that name a host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from string import ascii_lowercase, digits
from typing import Any

import pytest
import torch

from ...contract.capabilities import Capabilities
from ...contract.engine import WeightReceiver, WeightSender
from ...contract.storing import StoringSender
from ...contract.viewing import ViewableSender, ViewingReceiver
from ...errors import WeightlaneError
from ...runtime.devices import HOST
from ..processes.network import reset_peak, resident_memory, sleeps
from ..processes.payload import Parcel
from ..processes.pool import RemoteHalf, first_answers
from ..processes.resolve import create_engine
from .base import LARGE, ConformanceBase, ConnectionMaker

_STEADY_LOOKS = 4
"""Equal measurements of a sleeping sender's memory after which it counts as waiting."""
_LOOK_S = 0.04
_NEXT = str.maketrans(digits + ascii_lowercase, digits[1:] + digits[0] + ascii_lowercase[1:] + ascii_lowercase[0])


class HonestyChecks(ConformanceBase):
    """Checks that an engine has the abilities that it declares."""

    def test_halves_implement_what_the_engine_declares(
        self, engine_name: str, engine_options: Mapping[str, Any], capabilities: Capabilities, device: str
    ) -> None:
        """An engine that declares views or persistence has halves with the methods for that."""
        wanted: dict[str, tuple[type[WeightSender], type[WeightReceiver]]] = {
            "views": (ViewableSender, ViewingReceiver),
            "persistent": (StoringSender, WeightReceiver),
        }
        declared = [name for name in wanted if getattr(capabilities, name)]
        if not declared:
            pytest.skip("the engine declares nothing that needs further methods")
        engine = create_engine(engine_name, engine_options)
        where = torch.device(device) if device == HOST.type else torch.device(device, 0)
        halves = engine.make_sender("trainer/0", where), engine.make_receiver("rollout/0", where)
        for half in halves:
            half.close()
        lacking = [
            f"{name}=True needs a {kind.__name__}, {type(half).__name__} is none"
            for name in declared
            for half, kind in zip(halves, wanted[name], strict=True)
            if not isinstance(half, kind)
        ]
        assert not lacking, f"expected halves with the methods that were declared: {'; '.join(lacking)}"

    def test_zero_copy_takes_no_room_for_a_second_copy(
        self, connected: ConnectionMaker, capabilities: Capabilities, device: str
    ) -> None:
        """While an allocated bucket is sent, the sender's process grows by less than half of it.

        The check finds a copy that is made once the receiver is ready. It does not find one that is made in small parts.
        """
        if not capabilities.zero_copy:
            pytest.skip("the engine does not declare zero copy")
        if device != "cpu":
            pytest.skip("the memory of a process does not show copies on a device")
        self.needs_waiting_sender(capabilities)
        connection = connected(1)
        (receiver,) = connection.receivers
        receiver.stop()
        parcel = Parcel(1, 0, LARGE, 1)
        connection.start_send([parcel])
        if unclear := self._keeps_waiting(connection.sender):
            receiver.resume()
            pytest.skip(f"{unclear}, so a copy cannot be distinguished from none")
        try:
            reset_peak(connection.sender.pid)
        except OSError as error:
            receiver.resume()
            pytest.skip(f"this kernel does not report the peak of a process's memory: {error}")
        before, _ = resident_memory(connection.sender.pid)
        receiver.resume()
        connection.start_receive(receiver, [parcel])
        connection.check_received([receiver], connection.sender)
        _, peak = resident_memory(connection.sender.pid)
        grown = max(0, peak - before)
        assert grown < LARGE // 2, (
            f"expected no further copy of {LARGE} allocated bytes, the sender's process grew by {grown} while it sent them"
        )

    def _keeps_waiting(self, sender: RemoteHalf) -> str:
        """Wait until `sender` sleeps in its call with constant memory. Returns why that never happened; empty if it did."""
        steady, last, end = 0, -1, time.monotonic() + self.deadline_s
        while steady < _STEADY_LOOKS and time.monotonic() < end:
            if first_answers([sender], _LOOK_S):
                return "send was over while its receiver was frozen"
            now, _ = resident_memory(sender.pid)
            steady = steady + 1 if sleeps(sender.pid) and now == last else 0
            last = now
        return "" if steady == _STEADY_LOOKS else "the sender did not stop working"

    def test_an_engine_of_one_host_refuses_an_address_of_another_in_words(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A part of the sender's address identifies its host; a receiver's error for another value mentions another host."""
        if not capabilities.same_host_only:
            pytest.skip("the engine does not declare that both halves run on one host")
        connection = halves(1)
        connection.exchange_addresses()
        sender, (receiver,) = connection.sender.name, connection.receivers
        said = []
        for place in range(len(list(_with_another_text(connection.topology["senders"][sender])))):
            other = list(_with_another_text(connection.topology["senders"][sender]))[place]
            connection.topology["senders"] = {sender: other}
            connection.start_connect(receiver, self.expiring_s)
            try:
                receiver.result()
                said.append("nothing")
            except WeightlaneError as error:
                said.append(f"{type(error).__name__}: {error}")
            connection.close()
            connection.make()
            connection.exchange_addresses()
        assert any("another host" in text for text in said), (
            "expected connect to refuse the address of a sender on another host, with 'another host' in the message;"
            f" with each text of the address changed in turn, the errors were: {'; '.join(said) or 'none, there is no text'}"
        )


def _with_another_text(address: Any) -> Iterator[Any]:
    """Yield the address once for each text in it, with that text changed."""
    if isinstance(address, str):
        yield address.translate(_NEXT)
    pairs = address.items() if isinstance(address, dict) else enumerate(address) if isinstance(address, list) else ()
    for key, value in pairs:
        for other in _with_another_text(value):
            changed = address.copy()
            changed[key] = other
            yield changed
