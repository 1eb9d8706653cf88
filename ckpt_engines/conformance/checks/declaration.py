"""Checks that an engine keeps its declaration: class, options, capabilities, and addresses that name a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import ascii_lowercase, digits
from typing import Any

import pytest
import torch

from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import WeightReceiver, WeightSender
from ...contract.storing import StoringSender
from ...contract.viewing import ViewableSender, ViewingReceiver
from ...errors import ConfigError, WeightlaneError
from ...registry import why_unavailable
from ...runtime.devices import is_available, numbered_device
from ..processes.connection import waits_for_receivers
from ..processes.payload import Parcel
from ..processes.resolve import create_engine, engine_class
from .base import MIB, ConformanceBase, ConnectionMaker

_NO_VALUE = {"no": {"such": "value"}}
_NEXT = str.maketrans(digits + ascii_lowercase, digits[1:] + digits[0] + ascii_lowercase[1:] + ascii_lowercase[0])


class DeclarationChecks(ConformanceBase):
    """Checks of an engine's class, its options and its capabilities."""

    def test_options_are_described_and_unknown_or_ill_typed_ones_refused(
        self, engine_name: str, engine_options: Mapping[str, Any], capabilities: Capabilities
    ) -> None:
        """A user who mistypes an option gets an error before anything starts."""
        del capabilities  # requested because it skips an engine that cannot run here
        fields = engine_class(engine_name).config_type.model_fields
        undescribed = [name for name, field in fields.items() if not field.description]
        assert not undescribed, f"expected a description of every option, {', '.join(undescribed)} has none"
        ill_typed = {name for name, field in fields.items() if field.annotation in (str, int, float, bool)}
        for name in ("no_such_option", *sorted(ill_typed)):
            said = _refusal(engine_name, {**engine_options, name: _NO_VALUE})
            assert name in said, f"expected ConfigError that names {name} for {name}={_NO_VALUE}, {said}"

    def test_devices_exist_for_torch_and_the_engine_says_why_it_cannot_run(self, engine_name: str) -> None:
        """``unavailable_reason`` never raises, even where hardware is missing."""
        cls = engine_class(engine_name)
        if why_unavailable(cls) is not None:
            return  # torch may need the missing library to know the devices
        for device in cls.capabilities.devices:
            try:
                torch.device(device)
            except RuntimeError:
                pytest.fail(f"expected device types of torch, {device!r} is not one")

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
        where = numbered_device(device)
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
        connection = halves(1).exchange_addresses()
        sender, (receiver,) = connection.sender.name, connection.receivers
        said = []
        for place, _ in enumerate(_with_another_text(connection.topology["senders"][sender])):
            # A new address each time: a half is connected once.
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

    def test_buckets_on_every_declared_device_arrive(self, halves: ConnectionMaker, capabilities: Capabilities) -> None:
        """Buckets arrive from memory that the engine allocated on the device, and from memory that it did not."""
        present = [device for device in sorted(capabilities.devices) if is_available(device)]
        if not present:
            pytest.skip(f"this machine has none of the declared devices: {', '.join(sorted(capabilities.devices))}")
        for device in present:
            connection = halves(1, device=device).connect()
            connection.deliver([Parcel(1, 0, MIB + 1, 1)])
            connection.deliver([Parcel(2, 0, MIB + 1, 2)], allocated=False)
            connection.close()

    def test_allocated_buffers_are_what_was_asked_for(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """Each buffer has its size and a declared device, and shares memory with no other."""
        sizes = [1000, MIB + 1, 1]
        for nbytes, buffer in zip(sizes, connected(1).sender.call("allocate", sizes=sizes), strict=True):
            seen = {key: buffer[key] for key in ("dtype", "shape", "contiguous")}
            wanted = {"dtype": "torch.uint8", "shape": [nbytes], "contiguous": True}
            assert seen == wanted, f"expected {wanted} of allocate({nbytes}), it is {seen}"
            assert buffer["device"] in capabilities.devices, f"expected a declared device, it is {buffer['device']}"
            assert buffer["intact"], "expected memory of its own for each buffer, two allocated buffers share memory"

    def test_an_address_is_plain_data(self, halves: ConnectionMaker) -> None:
        """The address survives JSON unchanged, and stays the same."""
        connection = halves(1)
        for half in connection.halves:
            first, second = half.call("address"), half.call("address")
            assert first == second, f"expected the same address of {half.name} again, after {first} it is {second}"

    def test_nothing_is_unpickled(self, connected: ConnectionMaker) -> None:
        """Neither data from a peer nor data from a store is unpickled."""
        connection = connected(1)
        before = [half.call("unpickled") for half in connection.halves]
        connection.make()
        connection.connect().deliver([Parcel(1, 0, 1000, 1)])
        for half, earlier in zip(connection.halves, before, strict=True):
            times = half.call("unpickled") - earlier
            assert not times, f"expected nothing to be unpickled, {half.name} unpickled {times} times"

    def test_persistent_buckets_outlive_their_sender(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A committed version can be read after the sender's process was killed."""
        if not capabilities.persistent:
            pytest.skip("the engine does not declare that buckets are persistent")
        connection = connected(1)
        parcels = [Parcel(1, index, 100_000 + index, index) for index in range(3)]
        connection.start_send(parcels)
        connection.sender.result()
        connection.sender.kill()
        (receiver,) = connection.receivers
        connection.start_receive(receiver, parcels, deadline_s=self.deadline_s)
        connection.check_received([receiver])

    def test_buckets_that_make_one_file_are_each_received_and_outlive_their_sender(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The buckets belong to a tensor larger than a bucket, between tensors with a file of their own."""
        if not capabilities.persistent:
            pytest.skip("the engine does not declare that buckets are persistent")
        connection = connected(2)
        sizes, total = [50_000, 50_000, 1_001], 101_001
        parts = [
            Parcel(1, 1 + place, nbytes, 700 + place, 1, 50_000 * place, total) for place, nbytes in enumerate(sizes)
        ]
        parcels = [Parcel(1, 0, 4096, 1), *parts, Parcel(1, 4, 4096, 2)]
        connection.deliver(parcels)
        connection.sender.kill()
        for receiver in connection.receivers:
            connection.start_receive(receiver, parcels, deadline_s=self.deadline_s)
        connection.check_received(connection.receivers)

    def test_buckets_of_a_store_that_is_not_persistent_go_with_their_sender(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A sender that closes removes its buckets, so that no receiver relies on them."""
        if capabilities.persistent or Delivery.STORE not in capabilities.delivery:
            pytest.skip("the engine is not a store, or declares that it is persistent")
        connection = connected(1)
        (receiver,) = connection.receivers
        connection.start_send([Parcel(1, 0, 1000, 1)])
        connection.sender.result()
        connection.sender.call("close")
        connection.start_receive(receiver, [Parcel(1, 0, 1000, 1)], deadline_s=self.expiring_s)
        self.failure(receiver, WeightlaneError, between_s=self.in_time(self.expiring_s))

    def test_a_late_receiver_joins_an_elastic_engine_and_leaves_it(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The other halves stay connected."""
        if not capabilities.elastic:
            pytest.skip("the engine does not declare that it is elastic")
        connection = connected(1)
        connection.deliver([Parcel(1, 0, 50_000, 1)])
        late = connection.late_receiver()
        connection.start_connect(late)
        late.result()
        connection.receivers.append(late)
        connection.deliver([Parcel(2, 0, 50_000, 2)])
        late.call("close")
        connection.receivers.remove(late)
        connection.deliver([Parcel(3, 0, 50_000, 3)])

    def test_a_late_receiver_is_refused_by_an_engine_that_is_not_elastic(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """The late receiver gets an error, and the connection still works."""
        if capabilities.elastic:
            pytest.skip("the engine declares that it is elastic")
        connection = connected(1)
        late = connection.late_receiver()
        connection.start_connect(late, self.expiring_s)
        self.failure(late, WeightlaneError, between_s=self.in_time(self.expiring_s))
        connection.deliver([Parcel(1, 0, 50_000, 1)])

    def test_an_engine_that_crosses_hosts_holds_a_link_to_the_network(
        self, connected: ConnectionMaker, capabilities: Capabilities
    ) -> None:
        """A half without an internet socket or an open device of a fabric could not reach another host."""
        if capabilities.same_host_only:
            pytest.skip("the engine declares that both halves run on one host")
        if not waits_for_receivers(capabilities):
            pytest.skip("which hosts a store reaches depends on its location")
        connection = connected(1)
        connection.deliver([Parcel(1, 0, 1000, 1)])
        for half in connection.halves:
            assert half.call("links"), (
                f"expected a link to the network or same_host_only=True, {half.name} has no link to another host"
            )


def _refusal(engine: str, options: Mapping[str, Any]) -> str:
    """Return the error of making the engine with `options`."""
    try:
        create_engine(engine, options)
    except ConfigError as error:
        return str(error)
    return "the options were accepted"


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
