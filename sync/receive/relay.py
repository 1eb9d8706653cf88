"""`Relay`: forwards one version from a rollout rank to others; each verified bucket is sent from the memory it is in."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from weightlane.ckpt_engines import Bucket, Deadline, WeightlaneError, as_weightlane_error
from weightlane.plugins import RunHooks

from ..send.pipeline import BucketsInFlight, Destination
from ..version.manifest import Manifest

_MOST_IN_FLIGHT = 8
"""Most buckets posted to a link at a time, equal to `BucketSink.most_in_flight`. They are sent without a copy."""


class Relay:
    """Relays one version from participant `rank`, with `stall_s` seconds as the limit for one bucket.

    `manifest` is the manifest as sent. `links` has, for each link, the lanes that `rank` relays on it and their destinations,
    from `destinations_of`.

    Receiving threads call `on_bucket`, which never waits. A thread for each link runs `send`, which sends the lanes in order. A
    slow receiver therefore delays only the receivers after it in the route, and no two ranks wait for each other.
    """

    def __init__(
        self,
        links: Iterable[Mapping[int, Destination]],
        manifest: Manifest,
        deadline: Deadline,
        stall_s: float,
        rank: str,
        hooks: RunHooks,
    ) -> None:
        self._manifest = manifest
        self._deadline = deadline
        self._stall_s = stall_s
        self._rank = rank
        self._hooks = hooks
        self._relayed = {index for lanes in links for lane in lanes for index in manifest.buckets_of(lane)}
        self._changed = threading.Condition()
        self._ready: dict[int, tuple[torch.Tensor, str]] = {}
        """Verified buckets to be sent, with their checksums, by index in the version as sent."""
        self._error: WeightlaneError | None = None

    def on_bucket(self, index: int, data: torch.Tensor, checksum: str) -> None:
        """Add the verified bucket `index`; its bytes must stay unchanged until it is sent."""
        if index in self._relayed:
            with self._changed:
                self._ready[index] = data, checksum
                self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Make `send` raise `error`, because no further bucket will arrive."""
        with self._changed:
            self._error = self._error or as_weightlane_error(error, self._rank)
            self._changed.notify_all()

    def send(self, lanes: Mapping[int, Destination]) -> None:
        """Send every bucket of the `lanes` of one link. Raises the engine's error, or the one passed to `give_up`."""
        in_flight = BucketsInFlight(self._deadline, self._stall_s, self._on_sent)
        for lane, destination in lanes.items():
            for index in self._manifest.buckets_of(lane):
                while in_flight and (len(in_flight) >= _MOST_IN_FLIGHT or not self._is_ready(index)):
                    in_flight.end_oldest()
                data, checksum = self._take(index)
                in_flight.post(Bucket(self._manifest.version, index, data), destination, checksum)
        in_flight.end_all()

    def _is_ready(self, index: int) -> bool:
        with self._changed:
            return index in self._ready

    def _take(self, index: int) -> tuple[torch.Tensor, str]:
        with self._changed:
            self._changed.wait_for(lambda: index in self._ready or self._error is not None, self._deadline.remaining_s)
            if self._error is not None:
                raise self._error
            if index not in self._ready:
                raise self._deadline.error(f"bucket {index} of version {self._manifest.version}", part=self._rank)
            return self._ready.pop(index)

    def _on_sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self._rank, "relayed": True}
        self._hooks.bucket_sent(version=version, index=index, facts=facts)
