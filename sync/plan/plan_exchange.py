"""Supply and needs: the messages from which every participant of a session computes the same plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import Deadline, ProtocolError

from ..codecs.quantised.quantisation import check_format
from ..codecs.quantised.quantised_needs import needed_on_the_wire
from ..config import Relay
from ..version.bucket_checksums import SessionMailbox
from ..version.manifest import Manifest
from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec, is_computed

_PART = "transfer plan"
WHOLE = ""
"""The key of a rollout rank that needs every tensor in full."""


@dataclass(frozen=True)
class Supply:
    """The slices that the trainer ranks send, and the form in which they send them.

    Attributes:
        shares: The slices that each publisher sends, in rank order. Together they hold every element once.
        bucket_bytes: Payload of a bucket.
        checksummed: See `Manifest`.
        quantised: See `Manifest`.
        relay: How receivers relay lanes; see `SyncConfig`.
    """

    shares: Mapping[str, Placement]
    bucket_bytes: int
    checksummed: bool
    quantised: str
    relay: Relay = "off"

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor on the wire."""
        return tuple({spec.name: spec for share in self.shares.values() for spec in share.specs}.values())

    @cached_property
    def whole(self) -> Placement:
        """The placement of a rank that needs everything."""
        return Placement.whole(self.specs)

    @property
    def manifest(self) -> Manifest:
        """The manifest of versions that send the full supply as one stream."""
        return Manifest(0, self.specs, self.bucket_bytes, checksummed=self.checksummed, quantised=self.quantised)

    def on_the_wire(self, needed: Placement) -> Placement | None:
        """Translate `needed` from the receiver's tensors to the tensors on the wire, which may have other dtypes or be quantised.

        Returns None if `needed` has other tensors.
        """
        sent = {spec.name: spec for spec in self.specs}
        needed = needed.named_as(sent.keys())
        asked = {spec.name for spec in needed.specs}
        computed = [spec for name, spec in sent.items() if is_computed(name) and name not in asked]
        needed = Placement((*needed.specs, *computed), (*needed.boxes, *[()] * len(computed)))
        if sent.keys() == {spec.name for spec in needed.specs} and all(
            sent[spec.name].stands_for(spec) or not boxes
            for spec, boxes in zip(needed.specs, needed.boxes, strict=True)
        ):
            return Placement(tuple(sent[spec.name] for spec in needed.specs), needed.boxes)
        if not self.quantised:
            return None
        check_format(self.quantised)
        return needed_on_the_wire(needed, self.specs)

    def to_plain(self) -> list[Any]:
        """The supply as JSON."""
        shares = [[name, share.to_plain()] for name, share in self.shares.items()]
        return [shares, self.bucket_bytes, self.checksummed, self.quantised, self.relay]

    @classmethod
    def from_plain(cls, plain: Any) -> Supply:
        """Parse the message of trainer rank 0; raises `ProtocolError` for anything else."""
        match plain:
            case [
                [*shares],
                int() as bucket_bytes,
                bool() as checksummed,
                str() as quantised,
                ("off" | "chain" | "tree") as relay,
            ]:
                if all(isinstance(pair, list) and len(pair) == 2 for pair in shares):  # noqa: PLR2004 - name and share
                    pairs = [(str(name), Placement.from_plain(share)) for name, share in shares]
                    return cls(dict(pairs), bucket_bytes, checksummed, quantised, relay)
        raise ProtocolError("the message is no supply.", part=_PART)


class PlanExchange:
    """Exchanges the messages from which the participants of a session compute their plan.

    Args:
        mailbox: A mailbox that only this session uses.
    """

    def __init__(self, mailbox: SessionMailbox) -> None:
        self._mailbox = mailbox

    def supply(self, supply: Supply) -> None:
        """[trainer rank 0] Publish the supply."""
        self._mailbox.put("supply", supply.to_plain())

    def need(self, needed: Placement | None) -> str:
        """[rollout rank] Publish the needed slices. Returns their key, which is equal for ranks with the same needs."""
        if needed is None:
            return WHOLE
        self._mailbox.put(f"need/{needed.digest}", needed.to_plain())
        return needed.digest

    def supplied(self, deadline: Deadline) -> Supply:
        """Wait for the supply. Raises `DeadlineExceededError` or `ProtocolError`."""
        return Supply.from_plain(self._mailbox.get("supply", deadline))

    def needed(self, keys: Mapping[str, str], supply: Supply, deadline: Deadline) -> dict[str, Placement]:
        """The slices on the wire that each rollout rank needs, by the rank's name. Raises as `supplied`.

        A rank that needs other tensors than those sent gets everything: it then computes its needs again, or refuses.
        """
        known: dict[str, Placement] = {WHOLE: supply.whole}
        for key in keys.values():
            if key not in known:
                needed = Placement.from_plain(self._mailbox.get(f"need/{key}", deadline))
                known[key] = supply.on_the_wire(needed) or supply.whole
        return {name: known[key] for name, key in keys.items()}
