"""Checks that an engine has the abilities it declares: its classes, and addresses that name a host."""

from __future__ import annotations

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
from ..processes.resolve import create_engine
from .base import ConformanceBase, ConnectionMaker

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

    def test_an_engine_of_one_host_refuses_an_address_of_another_in_words(
        self, halves: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A part of the sender's address identifies its host. With another value, a receiver's error mentions another host."""
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
