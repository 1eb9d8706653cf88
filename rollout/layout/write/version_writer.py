"""`VersionWriter`: writes versions into one model by the chosen write method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from weightlane.ckpt_engines import CommitError, WeightlaneError
from weightlane.sync import LivePart, SlicedTensors
from weightlane.sync.version.box import Box
from weightlane.sync.version.sliced_tensors import SelectedTensors, Slicing

from ..loading.derived import StaleView, renew_derived, stale_views_renewed
from ..loading.reload import load_version
from ..map.layout_map import SourceSpec
from ..map.sliced_layout import sliced_layout
from ..rank_model import RankModel
from ..write_method import WriteKind, WriteMethod
from .commit_plan import CommitPlan


class VersionWriter:
    """Writes versions into one model. Every call is made inside vLLM's current config.

    A call that fails leaves a model that is partly old and partly new.

    Args:
        rank: The rank with its model.
        method: How versions are written.
        signature: Shapes and dtypes of the versions' tensors.
        stale_views: Views that a load of their layer leaves stale.
        read: The boxes of each tensor that a full reload reads; None if it needs whole tensors.
    """

    def __init__(
        self,
        rank: RankModel,
        method: WriteMethod,
        signature: Mapping[str, SourceSpec],
        stale_views: Sequence[StaleView],
        read: Mapping[str, list[Box]] | None = None,
    ) -> None:
        self._rank, self._method, self._signature, self._stale_views = rank, method, signature, stale_views
        self._read = read
        self.plan = None if method.kind is WriteKind.RELOAD else CommitPlan(method.layout, rank.model)
        """The copies of a version; None if no tensor is copied."""
        self._sliced: tuple[Slicing, CommitPlan] | None = None
        """The copies of versions that are received in the same slices as the last one."""

    def moved(self) -> bool:
        """Whether a parameter has moved to other memory, so that the layout must be traced again."""
        return self.plan is not None and self.plan.moved()

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight by `tensors`, with Hugging Face names, in full shapes or as `SlicedTensors`.

        On a CUDA device the copies are queued on the current stream when this returns.

        Raises:
            CommitError: The write failed on this rank, and its model must not serve until a version was loaded completely. Or a
                slice that is needed has not arrived, and nothing is changed.
        """
        if self.plan is None:
            if isinstance(tensors, SlicedTensors):
                self._check_arrived(tensors)
                self._reload((name, tensors.partly(name)) for name in tensors if name in self._signature)
            else:
                self._reload((name, tensors[name]) for name in tensors if name in self._signature)
            return
        if isinstance(tensors, SlicedTensors):
            self._copy_slices(tensors, self.plan)
        else:
            self.plan.commit(tensors)
        self._finish_copies(tensors)

    def write_arriving(self, arriving: Iterator[LivePart]) -> None:
        """Replace every weight by a version of which a few consecutive elements arrive at a time.

        Tensors that go through vLLM's own loading are assembled first: all of them if the others are copied, else one tensor
        at a time until vLLM has all tensors of a layer.

        Raises:
            WeightlaneError: The error that `arriving` raised, or `CommitError` as from `write`.
        """
        arriving = (run for run in arriving if run.name in self._signature)  # no rank reads the others
        if self.plan is None:
            self._reload_arriving(arriving)
            return
        self.plan.fill()
        assembled: dict[str, torch.Tensor] = {}
        for run in arriving:
            if run.name in self._method.reloaded_sources:
                self._assemble(run, assembled)
                continue
            self.plan.write_elements(run.name, run.start, run.values)
        for name in self._method.reloaded_sources - assembled.keys():
            assembled[name] = torch.empty(self._signature[name].shape, dtype=self._signature[name].dtype)
        self._finish_copies(assembled)

    def renew_derived(self) -> None:
        """Recompute the tensors that layers derive from parameters."""
        renew_derived(self._rank.model, self._method.derived, self._rank.config.model_config)

    def _finish_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._method.reloaded_layers:
            reloaded = ((name, tensors[name]) for name in tensors if name in self._method.reloaded_sources)
            self._reload(reloaded, self._method.reloaded_layers)
        self.renew_derived()

    def _check_arrived(self, tensors: SlicedTensors) -> None:
        """Raise `CommitError` unless every element that a reload reads has arrived: others would be undefined."""
        for name, spec in self._signature.items():
            boxes = [Box.whole(spec.shape)] if self._read is None else self._read[name]
            if not tensors.has(name, boxes):
                raise CommitError(
                    f"{name} was to be loaded, and only a part of what this rank needs of it has arrived.",
                    part=self._rank.part,
                    hint="Connect this replica again; it then asks for the slices that it needs.",
                )

    def _copy_slices(self, tensors: SlicedTensors, plan: CommitPlan) -> None:
        known = self._sliced
        if known is None or known[0] is not tensors.slicing:
            sliced = CommitPlan(sliced_layout(plan.layout, tensors.regions), self._rank.model)
            known = self._sliced = tensors.slicing, sliced
        staged, sources = tensors.staged, known[1].sources
        known[1].commit(staged if all(name in staged for name in sources) else SelectedTensors(tensors, sources))

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]], layers: Sequence[str] | None = None) -> None:
        """Load `tensors` into `layers` by vLLM's own loading; None for the whole model."""
        model, config = self._rank.model, self._rank.config.model_config
        with stale_views_renewed(model, self._stale_views):
            load_version(model, config, tensors, part=self._rank.part, layers=layers)

    def _reload_arriving(self, arriving: Iterator[LivePart]) -> None:
        """Give vLLM's own loading each tensor as soon as it is complete."""
        failure: list[WeightlaneError] = []

        def complete() -> Iterator[tuple[str, torch.Tensor]]:
            assembled: dict[str, torch.Tensor] = {}
            arrived: Counter[str] = Counter()
            for name, spec in self._signature.items():
                if not spec.numel:
                    yield name, torch.empty(spec.shape, dtype=spec.dtype, device=self._rank.device)
            try:
                for run in arriving:
                    self._assemble(run, assembled)
                    arrived[run.name] += run.values.numel()
                    if arrived[run.name] == self._signature[run.name].numel:
                        yield run.name, assembled.pop(run.name)
            except WeightlaneError as error:
                failure.append(error)
                raise

        tensors = complete()
        try:
            self._reload(tensors)
        except CommitError as error:
            raise (failure[0] if failure else error) from error
        for _ in tensors:  # Loading may stop early, but the sender waits until every bucket is taken.
            pass

    def _assemble(self, run: LivePart, assembled: dict[str, torch.Tensor]) -> None:
        """Copy the elements of `run` into their tensor in `assembled`."""
        if (tensor := assembled.get(run.name)) is None:
            spec = self._signature[run.name]
            tensor = assembled[run.name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._rank.device)
        tensor.view(-1)[run.start : run.start + run.values.numel()].copy_(run.values)
