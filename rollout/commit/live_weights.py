"""`LiveWeights`: the version that one rank's model holds. Versions replace it, or are rolled back, on all ranks or on none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weightlane.ckpt_engines import (
    CommitError,
    DeltaBaseError,
    QuarantinedError,
    WeightlaneError,
)
from weightlane.sync import Expectation, LiveStream, Placement, SlicedTensors, Subscriber
from weightlane.sync.codecs.quantised.restored import are_restored
from weightlane.sync.version.sliced_tensors import without_data

from ..contract.loader import RankLoader, SwappableDelta
from ..contract.rank_group import RankGroup
from .transfer_calls import UpdateRequest, validated

_log = logging.getLogger(__name__)


@dataclass
class _Change:
    """The change that one update makes on this rank: `tensors`, `delta` or `stream`, or none if nothing is to be done."""

    version: int = -1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Views of staging memory, which has to be released; empty if none is borrowed."""
    delta: SwappableDelta | None = None
    stream: LiveStream | None = None
    """A version that is written while it is received."""
    before: int | None = None
    """The version that serves until then; None for the checkpoint, which cannot be restored."""


class LiveWeights:
    """The weights of one rank's model. All ranks make every call together."""

    def __init__(self, loader: RankLoader, group: RankGroup) -> None:
        self.loader = loader
        self._group, self._part = group, loader.part
        self.intact = True
        """Whether the weights are one complete version, or the checkpoint."""
        self.in_place = False
        """Whether full versions are written while they are received."""
        self.version: int | None = None
        """The version of the weights; None if they are the checkpoint's, or not intact."""
        self._before: int | None = None
        """The version before `version`; None if it cannot be restored."""
        self._lost_by = "an earlier commit failed half-way"
        """Why the weights are not intact, where they are not."""
        self._asleep = False
        self._undo: SwappableDelta | None = None
        """The delta that rolls `version` back, if `version` was a delta."""

    @property
    def expectation(self) -> Expectation:
        """The tensors that a version has to have."""
        return self.loader.expectation

    def needed(self) -> Placement | None:
        """The slices that this rank needs of a version; None if it needs all tensors completely."""
        return self.loader.needed()

    def fell_asleep(self, *, lost: bool) -> None:
        """Refuse updates until `woke`: the memory of the weights is freed. With `lost`, their values do not come back."""
        self._asleep = True
        if lost:
            self.version, self._before, self._undo, self.intact = None, None, None, False
            self._lost_by = "the weights were freed for sleep"

    def woke(self) -> None:
        """Take updates again: the weights have memory."""
        self._asleep = False

    def update(self, fields: Mapping[str, Any], subscriber: Subscriber) -> WeightlaneError | None:
        """Make an `UpdateRequest` with these `fields` on every rank. Returns the first rank's error, or None.

        After an error, `intact` says whether the weights are one complete version.
        """
        change = _Change()
        error = self._run(lambda: self._prepare(change, validated(UpdateRequest, fields), subscriber))
        if change.stream is not None:
            error = self._write_arriving(change.stream, subscriber, error)
        elif error is None and change.delta is not None:
            error = self._swap(change, change.delta, subscriber)
        elif error is None and change.tensors:
            error = self._replace(change, subscriber)
        self._release(change, subscriber)
        if error is None or self.intact or isinstance(error, QuarantinedError):
            return error
        return QuarantinedError(
            f"{self._lost_by} and this commit could not begin: {type(error).__name__}: {error}",
            part=self._part,
            hint="Send a complete version again.",
        )

    def _prepare(self, change: _Change, request: UpdateRequest, subscriber: Subscriber) -> None:
        """Fill in `change`. It stays empty if there is nothing to roll back."""
        if self._asleep:
            change.stream = None if request.version is None else subscriber.take_stream(request.version)
            raise CommitError(
                "the weights are asleep, and a version would be written to freed memory.",
                part=self._part,
                hint="Wake them before the sync: trainer.colocate does so; of a server, POST /wake_up?tags=weights.",
            )
        self.loader.before_update()
        if request.version is None:
            assert request.rollback_of is not None, "one of the two is given"
            self._prepare_rollback(change, request.rollback_of, subscriber)
            return
        change.version, change.before = request.version, self.version
        change.stream = subscriber.take_stream(request.version)
        if change.stream is not None:
            change.stream.begin()
            return
        change.delta = subscriber.take_delta(request.version)
        if change.delta is not None:
            self._check_base(change.delta)
            return
        change.tensors = subscriber.take(request.version)

    def _prepare_rollback(self, change: _Change, version: int, subscriber: Subscriber) -> None:
        if self.version is not None and self.version < version:
            return  # The load of `version` failed, and was rolled back.
        if self.version != version:
            newer = "the weights" if self.version is None else f"version {self.version}"
            raise CommitError(
                f"version {version} cannot be rolled back, {newer} was committed after it.", part=self._part
            )
        if self.in_place and self._undo is None:
            raise CommitError(
                f"version {version} cannot be rolled back, it was written in place.",
                part=self._part,
                hint="Set rollout.commit to staged where memory allows to keep two versions.",
            )
        if self._undo is not None and self._before is not None:
            change.version, change.delta = self._before, self._undo
            return
        self._take_previous(change, version, self._before, subscriber)

    def _check_base(self, delta: SwappableDelta) -> None:
        if not self.intact or self.version != delta.base_version:
            here = "unknown weights are" if self.version is None or not self.intact else f"version {self.version} is"
            raise DeltaBaseError(
                f"version {delta.version} is a delta to version {delta.base_version}, {here} here.", part=self._part
            )
        delta.check()

    def _write_arriving(
        self, stream: LiveStream, subscriber: Subscriber, error: WeightlaneError | None
    ) -> WeightlaneError | None:
        """Write every bucket of a version into the parameters as it is received, unless there was an `error` before."""
        if error is None:
            error = self._run(lambda: self.loader.learn(stream.specs, self._group))
        if error is not None:
            stream.fail(error)  # The receiving thread must not wait for this rank.
            subscriber.restored()
            return error
        self.version, self._before, self._undo, self.intact = None, None, None, False
        error = self._run(lambda: self._write_parts(stream))
        if error is None:
            self.version, self.intact = stream.version, True
            subscriber.prepare_delta = self.loader.live_delta if self.loader.takes_deltas else None
            return None
        stream.fail(error)
        return self._mixture(error, "It was written in place, so that no earlier version can be restored.")

    def _swap(self, change: _Change, delta: SwappableDelta, subscriber: Subscriber) -> WeightlaneError | None:
        """Swap live elements with those of `delta` on every rank, or on none: a delta is committed, or rolled back."""
        version, undoing, swapped = self.version, delta is self._undo, False
        self.version, self.intact = None, False

        def swap() -> None:
            nonlocal swapped
            delta.swap()
            swapped = True
            self.loader.settle()

        def swap_back() -> None:
            if delta.mixed:
                raise CommitError("some elements of the delta are in the weights.", part=self._part)
            if swapped:
                delta.swap()
                self.loader.settle()

        error = self._run(swap)
        if error is not None:
            second = self._run(swap_back)
            if second is not None:
                return self._mixture(error, f"The version before it could not be restored: {second}")
            self.version, self.intact = version, True
            if not undoing:
                subscriber.restored()
            return error
        self.version, self.intact = change.version, True
        if undoing:
            self._before, self._undo = None, None
            subscriber.restored()
        else:
            self._before, self._undo = change.before, delta
        return None

    def _replace(self, change: _Change, subscriber: Subscriber) -> WeightlaneError | None:
        """Load `change.tensors` on every rank. If that fails, the version before is restored if it is still staged."""
        error = self._run(lambda: self._learn(change.tensors))
        if error is not None:
            return error
        began = time.perf_counter()
        version, self.version, self.intact = self.version, None, False
        self._undo = None
        error = self._run(lambda: self._load(change.tensors, subscriber))
        if error is None:
            self.version, self._before, self.intact = change.version, change.before, True
            _log.debug("weightlane: version %d loaded in %.4f s", change.version, time.perf_counter() - began)
            return None
        if self.loader.writes_atomically:
            self.version, self.intact = version, True
        if self.intact or isinstance(error, QuarantinedError):
            return error
        if change.before is None:
            return self._mixture(error, "No earlier version is staged.")
        self._release(change, subscriber)
        previous = _Change()
        second = self._run(lambda: self._take_previous(previous, change.version, version, subscriber))
        if second is None:
            second = self._run(lambda: self._learn(previous.tensors))
        if second is None:
            second = self._run(lambda: self._load(previous.tensors, subscriber))
        self._release(previous, subscriber)
        if second is not None:
            return self._mixture(error, f"The version before it could not be restored: {second}")
        self.version, self.intact = version, True
        return CommitError(
            f"version {change.version} could not be loaded, version {version} was restored: {error.message}",
            part=error.part,
        )

    def _take_previous(self, change: _Change, version: int, wanted: int | None, subscriber: Subscriber) -> None:
        """Borrow the version staged before `version` for `change`; raises `CommitError` if it is not `wanted`."""
        change.version, change.tensors = subscriber.take_previous(version)
        if change.version != wanted:
            served = "the checkpoint" if wanted is None else f"version {wanted}"
            raise CommitError(
                f"{served} served before version {version}, and version {change.version} is staged.", part=self._part
            )

    def _learn(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.loader.learn(without_data(tensors), self._group, sliced=isinstance(tensors, SlicedTensors))

    def _load(self, tensors: Mapping[str, torch.Tensor], subscriber: Subscriber) -> None:
        self.loader.write(tensors)
        # Tensors that arrive quantised are restored completely: one changed scale changes every element of its block.
        takes_deltas = self.loader.takes_deltas and not are_restored(tensors)
        subscriber.prepare_delta = self.loader.live_delta if takes_deltas else None
        self.loader.settle()

    def _write_parts(self, stream: LiveStream) -> None:
        self.loader.write_arriving(stream.parts())
        self.loader.settle()

    def _release(self, change: _Change, subscriber: Subscriber) -> None:
        """Give back the staging memory of `change`. Never raises."""
        borrowed, change.tensors = change.tensors, {}
        if not borrowed:
            return
        try:
            subscriber.release(change.version)
        except Exception as error:  # noqa: BLE001 - it fails the next sync, with its own error; this change is done
            _log.warning("weightlane: staging of version %d could not be released: %s", change.version, error)

    def _run(self, step: Callable[[], object]) -> WeightlaneError | None:
        return self._group.run(step, self._part)

    def _mixture(self, error: WeightlaneError, why: str) -> QuarantinedError:
        self._lost_by = "an earlier commit failed half-way"
        return QuarantinedError(
            f"the weights are a mixture of two versions: {error} {why}",
            part=self._part,
            peer=error.peer,
            hint="The replica must not serve until a complete version has been committed.",
        )
