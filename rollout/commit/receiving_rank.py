"""`ReceivingRank`: one rollout rank that follows a publisher. It stages versions, commits them, and rolls them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from weightlane.ckpt_engines import (
    DeadlineExceededError,
    ProtocolError,
    ReplicaTakenError,
    WeightlaneError,
)
from weightlane.sync import Expectation, Placement, Subscriber

from ..contract.rank_group import RankGroup
from .live_weights import LiveWeights
from .remote_failure import RemoteFailureError
from .transfer_calls import RANKS, ConnectRequest, UpdateRequest, replica_scope, validated


class Updatable(Protocol):
    """The part of a rank that versions change: a `LiveWeights`, or adapters beside weights that stay."""

    in_place: bool
    """Whether full versions are written while they are received."""

    @property
    def expectation(self) -> Expectation:
        """The tensors that a version has to have."""

    @property
    def intact(self) -> bool:
        """Whether everything that serves is of complete versions."""

    def needed(self) -> Placement | None:
        """The slices that this rank needs of a version; None if it needs all tensors completely."""

    def update(self, fields: Mapping[str, Any], subscriber: Subscriber) -> WeightlaneError | None:
        """Make an `UpdateRequest` on every rank. Returns the first rank's error, or None."""


class ReceivingRank:
    """One rank of a replica. All ranks make every call together, and agree on its outcome.

    Args:
        rank: The rank's number in the replica.
        world: Number of the replica's ranks.
        group: The ranks.
        device: Device of the model.
    """

    def __init__(self, rank: int, world: int, group: RankGroup, device: torch.device) -> None:
        self.part = f"rollout rank {rank}"
        self.group = group
        self.updatable: Updatable | None = None
        """The part that versions change. It outlives a connection, and keeps what is known of the model."""
        self._rank, self._world, self._device = rank, world, device
        self._subscriber: Subscriber | None = None
        self._publisher: Mapping[str, Any] = {}
        """Address of the publisher that this rank was subscribed to last."""

    def connect(self, fields: Mapping[str, Any], accept: Callable[[ConnectRequest], object]) -> None:
        """Leave the publisher that this rank is subscribed to, if any, and subscribe to the one in `fields`.

        `accept` makes `updatable` if there is none, or raises the reason why this model cannot do what is asked for.

        Raises:
            RemoteFailureError: With `ReplicaTakenError` where another publisher lives that is not to be left; every rank stays
                subscribed to it. With `ConfigError` or the subscriber's error; no rank stays subscribed.
        """
        if error := self.group.run(lambda: self._refuse_second(fields), self.part):
            self.report(error)
            return
        self.leave()
        requests: list[ConnectRequest] = []

        def check() -> None:
            requests.append(validated(ConnectRequest, fields))
            accept(requests[0])

        error = self.group.run(check, self.part)
        if error is None:
            error = self.group.run(lambda: self._subscribe(requests[0]), self.part)
        if error is not None:
            self.leave()
            self.report(error)

    def check_update(self, fields: Mapping[str, Any]) -> WeightlaneError | None:
        """Return the `ConfigError` if `fields` are no `UpdateRequest`, the `ProtocolError` before `connect`, or None."""
        return self.group.run(lambda: self._check_update(fields), self.part)

    def update(self, fields: Mapping[str, Any]) -> None:
        """Commit the version ``fields["version"]``, or roll back ``fields["rollback_of"]``.

        No rank begins before every rank has everything that it needs.

        Raises:
            RemoteFailureError: With the first rank's typed error, and whether the old weights are in place.
        """
        if self.updatable is None or self._subscriber is None:  # on all ranks or on none, since ranks connect together
            error = self.check_update(fields)
        else:
            error = self.updatable.update(fields, self._subscriber)
        if error is not None:
            self.report(error)

    def fell_asleep(self, *, lost: bool) -> None:
        """Take no updates until `woke`. With `lost`, the weights are gone, and the next version has to be a complete one."""
        if isinstance(self.updatable, LiveWeights):
            self.updatable.fell_asleep(lost=lost)
            if lost and self._subscriber is not None:
                self._subscriber.lost()

    def woke(self) -> None:
        """Take updates again: the weights have memory."""
        if isinstance(self.updatable, LiveWeights):
            self.updatable.woke()

    def leave(self) -> None:
        """Leave the publisher. The model keeps its weights. Idempotent."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def report(self, error: WeightlaneError) -> None:
        """Raise `error` on the rank that reports failures."""
        if self.group.raises:
            raise RemoteFailureError(error, intact=self.updatable is None or self.updatable.intact)

    def _refuse_second(self, fields: Mapping[str, Any]) -> None:
        """Raise `ReplicaTakenError` if this rank follows another publisher that lives, unless `fields` take it over."""
        follows = self._subscriber is not None and not self._subscriber.run_over
        if follows and fields.get("rendezvous") != self._publisher and fields.get("take_over") is not True:
            where = f"{self._publisher.get('host')}:{self._publisher.get('port')}"
            raise ReplicaTakenError(
                f"this server follows another publisher, at {where}, which lives.",
                part=self.part,
                hint="End that program, or take the server over: ServerReplica(..., take_over=True).",
            )

    def _subscribe(self, request: ConnectRequest) -> None:
        updatable = self.updatable
        assert updatable is not None, "accepted"
        updatable.in_place = request.commit == "in_place"
        self._publisher = request.rendezvous
        self._subscriber = Subscriber(
            f"{request.replica}/{self._rank}",
            request.rendezvous,
            request.backend,
            request.options,
            updatable.expectation,
            # In place a rank takes the next bucket only when all ranks have one: all must get the same buckets.
            needed=None if updatable.in_place else updatable.needed(),
            staging_limit_bytes=request.staging_limit_bytes,
            commit=request.commit,
            device=self._device,
        )
        if self._rank == 0:
            self._subscriber.rendezvous.mailbox(replica_scope(request.replica)).put(RANKS, self._world)

    def _check_update(self, fields: Mapping[str, Any]) -> None:
        request = validated(UpdateRequest, fields)
        if self.updatable is None or self._subscriber is None:
            version = request.rollback_of if request.version is None else request.version
            raise ProtocolError(
                f"version {version} was to be committed before this rank was connected.",
                part=self.part,
                hint="Connect it to a publisher first; vLLM's call for that is init_weight_transfer_engine.",
            )


def not_connected(limit_s: float, part: str) -> DeadlineExceededError:
    """The error of a connection that has taken longer than `limit_s` seconds."""
    hint = "Check that the publisher lives and can be reached, or raise rollout.connect_timeout_s."
    return DeadlineExceededError(f"not connected within {limit_s:.0f} s.", part=part, hint=hint)
