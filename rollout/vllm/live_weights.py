"""`LiveWeights`: the version that one rank's model holds. Versions replace it, or are rolled back, on all ranks or on none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

from weightlane.ckpt_engines import (
    CommitError,
    DeltaBaseError,
    QuarantinedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.sync import Expectation, LiveStream, Placement, Subscriber
from weightlane.sync.codecs.quantised.restored import are_restored

from ..commit.transfer_calls import UpdateRequest, validated
from ..layout.map.layout_map import SourceSpec
from ..layout.rank_model import RankModel
from ..layout.version_loader import VersionLoader
from ..layout.write.live_delta import LiveDelta
from ..rank_group import RankGroup

logger = init_logger("vllm.weightlane")


@dataclass
class _Change:
    """The change that one update makes on this rank: `tensors`, `delta` or `stream`, or none if nothing is to be done."""

    version: int = -1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Views of staging memory, which has to be released; empty if none is borrowed."""
    delta: LiveDelta | None = None
    stream: LiveStream | None = None
    """A version that is written while it is received."""
    before: int | None = None
    """The version that serves until then; None for the checkpoint, which cannot be restored."""


class LiveWeights:
    """The weights of one rank's model. All ranks make every call together."""

    def __init__(self, rank: RankModel, loader: VersionLoader, group: RankGroup) -> None:
        self.loader = loader
        self._group, self._rank, self._part = group, rank, rank.part
        self.intact = True
        """Whether the weights are one complete version, or the checkpoint."""
        self.in_place = False
        """Whether full versions are written while they are received."""
        self.version: int | None = None
        """The version of the weights; None if they are the checkpoint's, or not intact."""
        self._before: int | None = None
        """The version before `version`; None if it cannot be restored."""
        self._undo: LiveDelta | None = None
        """The delta that rolls `version` back, if `version` was a delta."""
        self._captured: dict[str, int] | None = None
        """The addresses of all tensors, which captured CUDA graphs read. None for an engine that captures none, and until the
        first update: layers may move some tensors before the model serves."""

    @property
    def expectation(self) -> Expectation:
        """The tensors that a version has to have."""
        return self.loader.expectation

    def needed(self) -> Placement | None:
        """The slices that this rank needs of a version; None if it needs all tensors completely."""
        return self.loader.needed()

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
            f"an earlier commit failed half-way and this one could not begin: {type(error).__name__}: {error}",
            part=self._part,
            hint="Send a complete version again.",
        )

    def _prepare(self, change: _Change, request: UpdateRequest, subscriber: Subscriber) -> None:
        """Fill in `change`. It stays empty if there is nothing to roll back."""
        if self._captured is None and _captures_graphs(self._rank.config):
            self._captured = dict(_addresses(self._rank.model))
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

    def _check_base(self, delta: LiveDelta) -> None:
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
            specs = {name: SourceSpec(spec.shape, spec.dtype) for name, spec in stream.specs.items()}
            error = self._run(lambda: self.loader.learn(specs, self._group))
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

    def _swap(self, change: _Change, delta: LiveDelta, subscriber: Subscriber) -> WeightlaneError | None:
        """Swap live elements with those of `delta` on every rank, or on none: a delta is committed, or rolled back."""
        version, undoing, swapped = self.version, delta is self._undo, False
        self.version, self.intact = None, False

        def swap() -> None:
            nonlocal swapped
            delta.swap()
            swapped = True
            self._settle()

        def swap_back() -> None:
            if delta.mixed:
                raise CommitError("some elements of the delta are in the weights.", part=self._part)
            if swapped:
                delta.swap()
                self._settle()

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
        error = self._run(lambda: self.loader.learn_for(change.tensors, self._group))
        if error is not None:
            return error
        began = time.perf_counter()
        version, self.version, self.intact = self.version, None, False
        self._undo = None
        error = self._run(lambda: self._load(change.tensors, subscriber))
        if error is None:
            self.version, self._before, self.intact = change.version, change.before, True
            logger.debug("weightlane: version %d loaded in %.4f s", change.version, time.perf_counter() - began)
            return None
        if isinstance(error, QuarantinedError):
            return error
        if change.before is None:
            return self._mixture(error, "No earlier version is staged.")
        self._release(change, subscriber)
        previous = _Change()
        second = self._run(lambda: self._take_previous(previous, change.version, version, subscriber))
        if second is None:
            second = self._run(lambda: self.loader.learn_for(previous.tensors, self._group))
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

    def _load(self, tensors: Mapping[str, torch.Tensor], subscriber: Subscriber) -> None:
        self.loader.writer.write(tensors)
        # Tensors that arrive quantised are restored completely: one changed scale changes every element of its block.
        takes_deltas = self.loader.takes_deltas and not are_restored(tensors)
        subscriber.prepare_delta = self.loader.live_delta if takes_deltas else None
        self._settle()

    def _write_parts(self, stream: LiveStream) -> None:
        self.loader.writer.write_arriving(stream.parts())
        self._settle()

    def _settle(self) -> None:
        """Wait until the device has written everything: the ranks then agree on what is so, and staging memory is used again.

        Raises:
            QuarantinedError: A tensor has moved away from where captured graphs read it: by a layer that replaces a parameter
                instead of filling it. Nothing would compute with the version.
        """
        device = self._rank.device
        if runtime_of(device).has_streams:
            torch.accelerator.synchronize(device)  # not one stream: layers may use their own
        here = {} if self._captured is None else dict(_addresses(self._rank.model))
        moved = [name for name, address in (self._captured or {}).items() if here.get(name) != address]
        if moved:
            raise QuarantinedError(
                f"{moved[0]} and {len(moved) - 1} more tensors have moved to other memory, and captured CUDA graphs compute with"
                " the memory from before.",
                part=self._part,
                hint="Start this replica anew; with --enforce-eager (rollout.extra_engine_args) tensors may move.",
            )

    def _release(self, change: _Change, subscriber: Subscriber) -> None:
        """Give back the staging memory of `change`. Never raises."""
        borrowed, change.tensors = change.tensors, {}
        if not borrowed:
            return
        try:
            subscriber.release(change.version)
        except Exception as error:  # noqa: BLE001 - it fails the next sync, with its own error; this change is done
            logger.warning("weightlane: staging of version %d could not be released: %s", change.version, error)

    def _run(self, step: Callable[[], object]) -> WeightlaneError | None:
        return self._group.run(step, self._part)

    def _mixture(self, error: WeightlaneError, why: str) -> QuarantinedError:
        return QuarantinedError(
            f"the weights are a mixture of two versions: {error} {why}",
            part=self._part,
            peer=error.peer,
            hint="The replica must not serve until a complete version has been committed.",
        )


def _captures_graphs(vllm_config: Any) -> bool:
    """Whether an engine with this configuration captures CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


def _addresses(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            if tensor.numel():
                yield name, tensor.data_ptr()
