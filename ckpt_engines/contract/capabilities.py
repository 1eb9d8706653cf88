"""`Capabilities`: the facts that an engine's class declares, which the framework and the conformance suite act on."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from ..errors import EngineContractError
from .field_docs import document_fields


class Delivery(StrEnum):
    """A kind of delivery of one bucket to several receivers."""

    BROADCAST = "broadcast"
    """One post reaches every receiver of the topology."""
    POINT_TO_POINT = "point-to-point"
    """A post may name any subset of the receivers."""
    STORE = "store"
    """A post writes to a place from which receivers read at any time later."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of an engine, as data. The framework's decisions depend on these and never on an engine's name.

    Raises `EngineContractError` when a value is of the wrong type, or a set is empty.
    """

    devices: frozenset[str]
    """torch device types in whose memory a bucket may be, e.g. ``{"cpu"}``; at least one."""
    delivery: frozenset[Delivery]
    """Every kind of delivery that the engine supports; at least one."""
    persistent: bool = False
    """Buckets outlive the sender's process. The engine's sender is a `StoringSender`."""
    elastic: bool = False
    """Receivers may join or leave while the others stay connected."""
    same_host_only: bool = False
    """Both halves must run on one host. The sender's address names its host, and a receiver on another host refuses it."""
    views: bool = False
    """Receivers can read a lasting bucket in the sender's memory. The halves are a `ViewableSender` and a `ViewingReceiver`."""
    collective: bool = False
    """All halves of a connection form one group, whose operations run in one order. The framework makes as few connections as it
    can, each with several senders. Every half posts its share of the operations in the group's order."""
    channels: bool = True
    """`connect` gets a `Channel` to each peer. False saves the sockets of an engine that needs none."""

    def __post_init__(self) -> None:
        # frozenset("cpu") would be the set of the letters c, p and u.
        for name, example in (("devices", '{"cpu"}'), ("delivery", "{Delivery.BROADCAST}")):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, AbstractSet) or not values:
                raise _wrong_value(name, values, f"{name}=frozenset({example}): a set, with at least one member")
            object.__setattr__(self, name, frozenset(values))
        if wrong := [device for device in self.devices if not (isinstance(device, str) and device)]:
            raise _wrong_value("devices", wrong[0], 'torch device types, such as frozenset({"cpu"})')
        try:
            object.__setattr__(self, "delivery", frozenset(map(Delivery, self.delivery)))
        except ValueError as error:
            known = ", ".join(f"Delivery.{item.name}" for item in Delivery)
            raise _wrong_value("delivery", set(self.delivery), f"a set of {known}") from error
        for field in fields(self)[2:]:
            if not isinstance(getattr(self, field.name), bool):
                raise _wrong_value(field.name, getattr(self, field.name), f"{field.name}=True, or leave it out")

    def to_plain(self) -> dict[str, Any]:
        """Return the capabilities by name, sets as sorted lists, for JSON."""
        return {**asdict(self), "devices": sorted(self.devices), "delivery": sorted(self.delivery)}


def _wrong_value(name: str, value: object, instead: str) -> EngineContractError:
    return EngineContractError(f"{name} is {value!r}.", part="Capabilities", hint=f"Write {instead}.")


document_fields(__name__)
