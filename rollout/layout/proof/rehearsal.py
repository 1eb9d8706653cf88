"""Proves, before any version is written, that versions are written right: on a second model, compared with ordinary loads.

Two made-up versions, which differ in every element, are each loaded into a fresh model by vLLM's ordinary loading. One of these
models then gets the other version, and its own again, by the write method under test. Every parameter, buffer and other tensor
must equal, bit for bit, the result of the ordinary load, and every layer must compute the same. A tensor that stays stale cannot
pass, because the ordinary loads differ in everything that depends on a weight. What is not computed the same twice in one model
proves nothing: it is left out, and replaced by a pattern for the layers after it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import LivePart
from weightlane.sync.version.box import Box

from ...contract.rank_group import RankGroup
from ..loading.derived import StaleView
from ..loading.model_errors import described_failure
from ..map.layout_map import SourceSpec
from ..rank_model import RankModel
from ..trace.loading_reads import OnlyRead
from ..write.version_writer import VersionWriter
from ..write_method import WriteMethod
from .device_room import room_for_second
from .fresh_model import fresh_model
from .layer_outputs import output_checksums
from .made_up_values import MadeUpValues
from .model_tensors import tensor_checksums, tensor_placements

logger = logging.getLogger("vllm.weightlane")
T = TypeVar("T")
_RUNS = 3
"""Runs into which a rehearsed tensor is cut, so that some of them end within a row."""
_OUTPUT = "output of "
_MOST_SHOWN = 300
"""Most characters of an error of vLLM's."""


class Rehearsal:
    """Rehearses versions of one rank. All ranks make every call together, inside vLLM's config.

    Args:
        rank: The rank with its live model, which is not changed.
        signature: Shape and dtype of every tensor of the versions.
        group: The ranks.
        may_move: Whether the live model's weights may move to other memory: nothing that holds their addresses exists yet.
        optional: Tensors that the checkpoint has and versions need not have. Ordinary loads get them, and the written versions
            do not, so that a difference shows if they matter.
        tied: The first name of each tensor that is a second name of another.
    """

    def __init__(
        self,
        rank: RankModel,
        signature: Mapping[str, SourceSpec],
        group: RankGroup,
        *,
        may_move: bool = True,
        optional: Mapping[str, SourceSpec] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self._rank, self._signature, self._group = rank, signature, group
        specs = {**signature, **(optional or {})}
        self._first, self._second = (MadeUpValues(specs, seed, rank.device, tied) for seed in (0, 1))
        self._may_move = may_move
        self._second_state: dict[str, str] | None = None
        """The state of a model after an ordinary load of the second version."""
        self.stale_views: Sequence[StaleView] = ()
        """Views that a load of their layer leaves stale; known after `first_mismatch`."""
        self._unsteady: set[str] = set()
        """Layers whose outputs, or whose inputs (``input of <layer>``), are not computed the same twice."""

    def first_mismatch(self, method: WriteMethod, read: Mapping[str, list[Box]] | None) -> str | None:
        """Compare models written by `method` with ordinary loads. Returns the first rank's mismatch, or None.

        Args:
            method: How the versions are written.
            read: The boxes of each tensor that are sent; None if complete tensors are sent.
        """
        found: str | None = None
        with ExitStack() as room:
            second = room_for_second(self._rank.model, self._rank.device, may_move=self._may_move)
            try:
                self._on_all_ranks(lambda: room.enter_context(second))
                self._compare(method, read)
            except _MismatchError as mismatch:
                found = str(mismatch)
            # Now no second model is left, also not in a traceback or a cycle: the first one may need its memory.
            gc.collect()
        return found

    def _compare(self, method: WriteMethod, read: Mapping[str, list[Box]] | None) -> None:
        if self._second_state is None:
            self._load_second()
            gc.collect()  # The model of `_load_second`: `_compare` builds another.
        assert self._second_state is not None, "`_load_second` has set it"
        second = self._second_state
        fresh, _ = self._on_all_ranks(lambda: fresh_model(self._rank, self._first))
        first = self._on_all_ranks(lambda: self._state(fresh))

        def begin() -> VersionWriter:
            live, built = (
                {name: each for name, each in tensor_placements(model).items() if first.get(name) != second.get(name)}
                for model in (self._rank.model, fresh.model)
            )
            if (name := _first_difference(live, built)) is not None:
                raise _MismatchError(f"{name} has another layout in memory than in a model loaded with other values")
            return VersionWriter(fresh, method, self._signature, self.stale_views)

        def sent(values: MadeUpValues) -> Mapping[str, torch.Tensor]:
            chosen = values.only(self._signature)
            return chosen if read is None else OnlyRead(chosen, read)

        def compare(wanted: Mapping[str, str]) -> None:
            if (name := _first_difference(self._state(fresh), wanted)) is None:
                return
            if name.startswith(_OUTPUT):
                layer = name.removeprefix(_OUTPUT) or "the model"
                raise _MismatchError(f"{layer} does not compute what it computes after an ordinary load")
            raise _MismatchError(f"{name} differs from an ordinary load")

        writer = self._on_all_ranks(begin)
        self._on_all_ranks(lambda: writer.write(sent(self._second)))
        self._on_all_ranks(lambda: compare(second))
        self._on_all_ranks(lambda: writer.write_arriving(_runs_of(sent(self._first))))
        self._on_all_ranks(lambda: compare(first))

    def _load_second(self) -> None:
        """Load the second version, and keep its state."""
        fresh, stale_views = self._on_all_ranks(lambda: fresh_model(self._rank, self._second))
        self._find_unsteady(fresh)
        self._second_state = self._on_all_ranks(lambda: self._state(fresh))
        self.stale_views = stale_views

    def _find_unsteady(self, fresh: RankModel) -> None:
        """Find what is not computed the same twice."""
        while True:
            runs = self._on_all_ranks(lambda: [self._outputs(fresh, inputs=True) for _ in range(2)])
            found = {name for name in self._group.gather(_first_difference(*runs)) if name is not None}
            if not found:
                break
            self._unsteady |= found
        if self._unsteady:
            logger.warning(
                "weightlane: not computed the same twice, and so not compared: %s", ", ".join(sorted(self._unsteady))
            )

    def _outputs(self, fresh: RankModel, *, inputs: bool = False) -> dict[str, str]:
        try:
            return output_checksums(fresh, self._unsteady, inputs=inputs)
        except Exception as cause:
            raise _MismatchError(f"vLLM has loaded it and cannot compute with it: {_described(cause)}") from cause

    def _state(self, fresh: RankModel) -> dict[str, str]:
        """Checksums of every layer's output and of every tensor.

        Tensors come second, because some of them are made or converted when a layer first computes.
        """
        computed = {f"{_OUTPUT}{layer}": checksum for layer, checksum in self._outputs(fresh).items()}
        return tensor_checksums(fresh.model) | computed

    def _on_all_ranks(self, step: Callable[[], T]) -> T:
        """The result of `step`, which every rank runs. Raises `_MismatchError` with the reason of the first failed rank."""
        results: list[T] = []
        reason: str | None = None
        try:
            results.append(step())
        except _MismatchError as different:
            reason = str(different)
        except WeightlaneError as error:
            reason = error.message
        except Exception as cause:  # noqa: BLE001 - other ranks wait; without a comparison there is no proof
            reason = f"it cannot be compared with an ordinary load: {_described(cause)}"
        for failed in self._group.gather(reason):
            if failed:
                raise _MismatchError(failed)
        return results[0]


class _MismatchError(Exception):
    """Raised when a written version differs from an ordinary load, or cannot be compared with one."""


def _described(cause: Exception) -> str:
    """The layer and the error, as part of a sentence."""
    return described_failure(cause)[:_MOST_SHOWN].rstrip(".")


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first name whose values differ, or None."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


def _runs_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[LivePart]:
    """A version in runs of elements, some of which end within a row."""
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        length = flat.numel() // _RUNS + 1
        for start in range(0, flat.numel(), length):
            yield LivePart(name, start, flat[start : start + length])
