"""Shows that versions are written right before one is: in a model that never serves, beside ordinary loads of the same values.

Two made-up versions, in which every element differs, are each loaded into a fresh model by vLLM's ordinary loading. One of these
models then gets the other version, and its own again, in the way that versions are to be written: every parameter, buffer and
other tensor must be, bit for bit, what the ordinary load left, and every layer must compute the same. A tensor that is left
behind, or that nothing renews, cannot pass: the ordinary loads differ in whatever depends on a weight.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import LivePart
from weightlane.sync.version.box import Box

from ...commit.rank_agreement import RankGroup
from ..acceptance import Verdict
from ..loading.derived import LeftBehind
from ..map.layout_map import SourceSpec
from ..trace.loading_form import OnlyRead
from ..write.writer import VersionWriter
from .equal_compute import first_difference, layer_digests
from .fresh_load import FreshModel, MadeUpValues, digests, fresh_model, looks, room_beside

_PARTS = 3
_OUTPUT = "output of "


class Rehearsal:
    """Rehearses the versions of one rank, before its model serves. All ranks make every call together, inside vLLM's config.

    Args:
        model: The live model; it is not touched.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        signature: What the versions are made of.
        group: The ranks.
        part: Name of this rank for error messages.
        computes: Whether all ranks are there, so that a model can compute.
        may_move: Whether the live model's weights may get other memory: nothing has been made yet that knows where they are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        signature: Mapping[str, SourceSpec],
        group: RankGroup,
        *,
        part: str,
        computes: bool,
        may_move: bool = True,
    ) -> None:
        self._model, self._config, self._device = model, vllm_config, device
        self._signature, self._group, self._part, self._computes = signature, group, part, computes
        self._first, self._second = (MadeUpValues(signature, seed, device) for seed in (0, 1))
        self._may_move = may_move
        self._wanted: dict[str, str] | None = None
        """The state after an ordinary load of the second version."""
        self.left_behind: Sequence[LeftBehind] = ()
        """Views that the model's layers leave behind; known after a trial."""

    def trouble_with(self, verdict: Verdict, read: Mapping[str, list[Box]] | None) -> str | None:
        """Why versions must not be written as `verdict` says, by the first rank that objects; None if it is right on all.

        Args:
            verdict: How they are written.
            read: What is sent of each tensor; None for all.
        """
        with ExitStack() as room:
            beside = room_beside(self._model, self._device, may_move=self._may_move)
            trouble = self._together(lambda: room.enter_context(beside))
            # No second model is left when this returns: the first one may need its memory.
            return trouble if trouble is not None else self._compared(verdict, read)

    def _compared(self, verdict: Verdict, read: Mapping[str, list[Box]] | None) -> str | None:
        if self._wanted is None:
            trouble = self._together(self._load_second)
            if trouble is not None:
                return trouble
        held: list[FreshModel] = []
        trouble = self._together(lambda: held.append(fresh_model(self._config, self._first)))
        return trouble if trouble is not None else self._try(held[0], verdict, read)

    def _load_second(self) -> None:
        fresh = fresh_model(self._config, self._second)
        self._wanted = self._state(fresh)
        self.left_behind = fresh.left_behind
        del fresh
        gc.collect()

    def _state(self, fresh: FreshModel) -> dict[str, str]:
        """Digests of what every layer computes and, after that, of what the model holds.

        After, because some of it is made or converted when it is first needed.
        """
        try:
            computed = layer_digests(fresh.model, fresh.config, self._device) if self._computes else {}
        except Exception as cause:
            raise _NotShownError(
                f"vLLM has loaded it and cannot compute with it: {type(cause).__name__}: {str(cause)[:200]}"
            ) from cause
        return digests(fresh.model) | {f"{_OUTPUT}{layer}": digest for layer, digest in computed.items()}

    def _try(self, fresh: FreshModel, verdict: Verdict, read: Mapping[str, list[Box]] | None) -> str | None:
        assert self._wanted is not None, "loaded before"
        second, first = self._wanted, {}
        writers: list[VersionWriter] = []

        def begin() -> None:
            first.update(self._state(fresh))
            here, there = (
                {name: look for name, look in looks(model).items() if first.get(name) != second.get(name)}
                for model in (self._model, fresh.model)
            )
            if (name := first_difference(here, there)) is not None:
                raise _NotShownError(f"{name} does not lie in memory as in a model that is loaded with other values")
            writers.append(
                VersionWriter(
                    fresh.model,
                    fresh.config,
                    self._device,
                    verdict,
                    self._signature,
                    self.left_behind,
                    part=self._part,
                )
            )

        def sent(values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return values if read is None else OnlyRead(values, read)

        def compare(wanted: Mapping[str, str]) -> None:
            if (name := first_difference(self._state(fresh), wanted)) is None:
                return
            if name.startswith(_OUTPUT):
                layer = name.removeprefix(_OUTPUT) or "the model"
                raise _NotShownError(f"{layer} does not compute what it computes after an ordinary load")
            raise _NotShownError(f"{name} is not what an ordinary load leaves there")

        steps: list[Callable[[], object]] = [
            begin,
            lambda: writers[0].load(sent(self._second)),
            lambda: compare(second),
            lambda: writers[0].load_pieces(_pieces_of(sent(self._first))),
            lambda: compare(first),
        ]
        return next((trouble for step in steps if (trouble := self._together(step)) is not None), None)

    def _together(self, step: Callable[[], object]) -> str | None:
        """The reason given by the first rank on which `step` failed; None if it failed on none."""
        said: str | None = None
        try:
            step()
        except _NotShownError as different:
            said = str(different)
        except WeightlaneError as error:
            said = error.message
        except Exception as cause:  # noqa: BLE001 - other ranks wait; what cannot be compared is not shown to be right
            said = f"it cannot be compared with an ordinary load: {type(cause).__name__}: {str(cause)[:200]}"
        return next((fact for fact in self._group.exchange(said) if fact), None)


class _NotShownError(Exception):
    """A written version differs from an ordinary load, or the two cannot be compared."""


def _pieces_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[LivePart]:
    """A version in pieces of which some are not whole rows."""
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        length = flat.numel() // _PARTS + 1
        for start in range(0, flat.numel(), length):
            yield LivePart(name, start, flat[start : start + length])
