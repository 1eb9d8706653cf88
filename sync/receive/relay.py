"""What a rollout rank hands on to others: each bucket as soon as it has come and was verified, from the memory it came into."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import Bucket, Deadline, SenderLink, WeightlaneError, as_weightlane_error

from ..plan.session_plan import SessionPlan
from ..send.pipeline import BucketsInFlight, Destination, OnSent
from ..version.manifest import Manifest

_AT_A_TIME = 8
"""How many buckets are on their way through a link at a time: they lie where they came to, and take no memory."""


@dataclass(frozen=True, slots=True)
class RelayLink:
    """A link through which a rank hands lanes on.

    Attributes:
        receivers: Whoever gets something.
        lanes: Where each goes, by its number, in the order in which they are sent.
    """

    receivers: tuple[str, ...]
    lanes: Mapping[int, Destination]


def onward_links(name: str, planned: SessionPlan, senders: Mapping[int, SenderLink]) -> tuple[RelayLink, ...]:
    """The links through which the rank `name` hands on, whose connected `senders` are given by link."""
    return tuple(
        RelayLink(
            link.receivers,
            {
                lane: Destination(senders[link.number], planned.routes[lane].next_after(name))
                for lane in link.lanes[name]
            },
        )
        for link in planned.sent_by(name)
    )


class Relay:
    """Of one version at one rank.

    Whoever receives says with `came` what is there, and never waits; a thread for each link runs `hand_on`, in the order that its
    receivers expect: that of the lanes. So a receiver that is slow holds up who is behind it on the way, and nobody else, and
    no two ranks that hand different lanes on to one another can wait for each other.

    Args:
        links: Through which it is handed on.
        manifest: Of all that is sent.
        deadline: For all of it.
        stall_s: Longest time for one bucket, in seconds.
        part: The rank, for error messages.
        on_sent: Told of every bucket; called on the links' threads.
    """

    def __init__(
        self,
        links: Sequence[RelayLink],
        manifest: Manifest,
        deadline: Deadline,
        stall_s: float,
        part: str,
        on_sent: OnSent,
    ) -> None:
        self._manifest = manifest
        self._deadline = deadline
        self._stall_s = stall_s
        self._part = part
        self._on_sent = on_sent
        self._wanted = {index for link in links for lane in link.lanes for index in manifest.buckets_of(lane)}
        self._changed = threading.Condition()
        self._there: dict[int, tuple[torch.Tensor, str]] = {}
        """What has come and was not handed on yet, and its checksum, by the index it was sent as."""
        self._error: WeightlaneError | None = None

    def came(self, index: int, data: torch.Tensor, checksum: str) -> None:
        """Bucket `index`, as it was sent, is there and verified; it stays as it is until it was handed on."""
        if index in self._wanted:
            with self._changed:
                self._there[index] = data, checksum
                self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error = self._error or as_weightlane_error(error, self._part)
            self._changed.notify_all()

    def hand_on(self, link: RelayLink) -> None:
        """Hand everything on that goes through `link`. Raises what the engine raises, or what it was given up with."""
        outflow = BucketsInFlight(self._deadline, self._stall_s, self._on_sent)
        for lane, destination in link.lanes.items():
            for index in self._manifest.buckets_of(lane):
                while outflow and (len(outflow) >= _AT_A_TIME or not self._is_there(index)):
                    outflow.end_oldest()
                data, checksum = self._take(index)
                outflow.post(Bucket(self._manifest.version, index, data), destination, checksum)
        outflow.end_all()

    def _is_there(self, index: int) -> bool:
        with self._changed:
            return index in self._there

    def _take(self, index: int) -> tuple[torch.Tensor, str]:
        with self._changed:
            self._changed.wait_for(lambda: index in self._there or self._error is not None, self._deadline.remaining_s)
            if self._error is not None:
                raise self._error
            if index not in self._there:
                raise self._deadline.error(f"bucket {index} of version {self._manifest.version}", part=self._part)
            return self._there.pop(index)
