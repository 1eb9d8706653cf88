"""`VersionWriter`: writes versions into one model, in the way that was decided for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError, WeightlaneError
from weightlane.sync import LivePart, SlicedTensors
from weightlane.sync.version.sliced_tensors import SelectedTensors, Slicing

from ..acceptance import Verdict, Way
from ..loading.derived import LeftBehind, renew_derived, views_renewed
from ..loading.partial_reload import reload_layers
from ..loading.weight_loading import load_version
from ..map.layout_map import SourceSpec
from ..map.sliced_layout import sliced_layout
from .commit_plan import CommitPlan


class VersionWriter:
    """Every call is made inside vLLM's current config. What may fail leaves a model that is partly old and partly new.

    Args:
        model: The model.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        verdict: What was decided about the versions.
        signature: What they are made of.
        left_behind: Views that processing leaves behind when a layer is loaded.
        part: Name of this rank for error messages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        verdict: Verdict,
        signature: Mapping[str, SourceSpec],
        left_behind: Sequence[LeftBehind],
        *,
        part: str,
    ) -> None:
        self._model, self._config, self._device = model, vllm_config, device
        self._verdict, self._signature, self._left_behind, self._part = verdict, signature, left_behind, part
        self.plan = None if verdict.way is Way.RELOAD else CommitPlan(verdict.layout, model)
        """The copies of a version; None where nothing goes by copies."""
        self._sliced: tuple[Slicing, CommitPlan] | None = None
        """The copies of versions that come in the same slices as the last one."""

    def moved(self) -> bool:
        """Whether a parameter has got other memory, so that it must be learned anew where weights go."""
        return self.plan is not None and self.plan.moved()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by `tensors`, Hugging Face names and full shapes or slices of them.

        On a CUDA device the copies are queued on the current stream when this returns.
        """
        if self.plan is None:
            # Of slices each tensor as far as it has come, which is all that is read.
            come = ((name, tensors.partly(name)) for name in tensors) if isinstance(tensors, SlicedTensors) else tensors
            with self._views_renewed():
                load_version(self._model, self._config.model_config, come, part=self._part)
            return
        if isinstance(tensors, SlicedTensors):
            self._commit_slices(tensors, self.plan)
        else:
            self.plan.commit(tensors)
        self._finish_copies(tensors)

    def load_pieces(self, pieces: Iterator[LivePart]) -> None:
        """As `load`, for a version that comes in pieces, of which one is kept at a time.

        What goes through vLLM's own loading is put together first: all of it where the rest is copied, else a tensor at a time
        until vLLM has a layer complete.

        Raises:
            WeightlaneError: What `pieces` raised, or `CommitError` as `load`.
        """
        if self.plan is None:
            self._reload_arriving(pieces)
            return
        self.plan.fill()
        apart: dict[str, torch.Tensor] = {}
        for piece in pieces:
            if piece.name not in self._verdict.sources:
                self.plan.write_part(piece.name, piece.start, piece.values)
                self._settle_copies()
                continue
            collect(piece, self._signature[piece.name], apart, self._device)
        for name in self._verdict.sources - apart.keys():
            apart[name] = torch.empty(self._signature[name].shape, dtype=self._signature[name].dtype)
        self._finish_copies(apart)

    def renew_derived(self) -> None:
        """Make anew what layers derive from parameters that were changed since."""
        renew_derived(self._model, self._verdict.derived, self._config.model_config)

    def _finish_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._verdict.modules:
            with self._views_renewed():
                reload_layers(
                    self._model,
                    self._config.model_config,
                    tensors,
                    modules=self._verdict.modules,
                    sources=self._verdict.sources,
                    part=self._part,
                )
        self.renew_derived()

    def _views_renewed(self) -> AbstractContextManager[None]:
        return views_renewed(self._model, self._left_behind)

    def _commit_slices(self, tensors: SlicedTensors, plan: CommitPlan) -> None:
        known = self._sliced
        if known is None or known[0] is not tensors.slicing:
            sliced = CommitPlan(sliced_layout(plan.layout, tensors.regions), self._model)
            known = self._sliced = tensors.slicing, sliced
        staged, sources = tensors.staged, known[1].sources
        known[1].commit(staged if all(name in staged for name in sources) else SelectedTensors(tensors, sources))

    def _settle_copies(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # The piece's memory is received into as soon as it is dropped.

    def _reload_arriving(self, pieces: Iterator[LivePart]) -> None:
        """Feed vLLM's own loading with whole tensors as they become complete."""
        failure: list[WeightlaneError] = []

        def whole() -> Iterator[tuple[str, torch.Tensor]]:
            apart: dict[str, torch.Tensor] = {}
            try:
                for name, spec in self._signature.items():
                    if not spec.numel:
                        yield name, torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                arrived: Counter[str] = Counter()
                for piece in pieces:
                    spec = self._signature[piece.name]
                    collect(piece, spec, apart, self._device)
                    arrived[piece.name] += piece.values.numel()
                    if arrived[piece.name] == spec.numel:
                        yield piece.name, apart.pop(piece.name)
            except WeightlaneError as error:
                failure.append(error)
                raise

        arriving = whole()
        try:
            with self._views_renewed():
                load_version(self._model, self._config.model_config, arriving, part=self._part)
        except CommitError as error:
            raise (failure[0] if failure else error) from error
        for _ in arriving:  # Loading need not look at everything, but the sender must get rid of it.
            pass


def collect(piece: LivePart, spec: SourceSpec, apart: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put a piece into the tensor of its name in `apart`."""
    if (whole := apart.get(piece.name)) is None:
        whole = apart[piece.name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    whole.view(-1)[piece.start : piece.start + piece.values.numel()].copy_(piece.values)
