"""`VersionLoader`: puts complete versions into a live vLLM model, by copies where these are known to be right.

How versions are written is learned before the model serves, and shown to be right on a model that never does: see `rehearsal`.
Where copies are not right versions go through vLLM's own loading; where that is not right either they are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.logger import init_logger

from weightlane.ckpt_engines import CommitError, ConfigError
from weightlane.sync import IncomingDelta, LivePart, Placement, SlicedTensors
from weightlane.sync.version.box import Box
from weightlane.sync.version.sliced_tensors import without_data

from ..commit.rank_agreement import RankGroup
from .acceptance import Verdict, Way, judge, untraceable, whole_reload
from .loading.derived import LeftBehind
from .map.layout_map import LayoutMap, Refusal, SourceSpec
from .map.needs import needed_boxes, needed_placement
from .proof.rehearsal import Rehearsal
from .trace.loading_form import read_by_loading
from .trace.trace import trace_loading
from .write.commit_plan import CommitPlan
from .write.live_delta import LiveDelta
from .write.writer import VersionWriter

logger = init_logger("vllm.weightlane")

_Signature = dict[str, SourceSpec]


class VersionLoader:
    """Loads versions into one rank's model. Every call is made by all ranks together, inside vLLM's current config.

    Args:
        model: The live model.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        part: Name of this rank for error messages.
        tied: Checkpoint names that loading may ignore, since they are another tensor under a second name, and that tensor's.
        computes: Whether all ranks are there, so that the model can compute.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        *,
        part: str,
        tied: Mapping[str, str] | None = None,
        computes: bool = True,
    ) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._part = part
        self._tied = tied or {}
        self._computes = computes
        self._signature: _Signature = {}
        self._verdict: Verdict | None = None
        self._writer: VersionWriter | None = None
        """None until versions like these were shown to be written right."""
        self._rehearsed: tuple[_Signature, Verdict, Verdict] | None = None
        """What was shown last: of which tensors, what was judged of them, and what was shown to be right in the end."""
        self._left_behind: Sequence[LeftBehind] = ()
        self._read: dict[str, list[Box]] | None = None
        """What vLLM's own loading reads of versions that go through it, where that is shown to be enough."""

    @property
    def verdict(self) -> Verdict | None:
        """What was decided about the versions that come; None before they were learned."""
        return self._verdict

    @property
    def plan(self) -> CommitPlan | None:
        """The copies of a version, for what goes by copies; None where nothing does, and before they were learned."""
        return None if self._writer is None else self._writer.plan

    @property
    def takes_deltas(self) -> bool:
        """Whether changed elements can be put straight into the parameters: every weight goes by copies."""
        return self._writer is not None and self._verdict is not None and self._verdict.way is Way.TRACED

    def live_delta(self, delta: IncomingDelta) -> LiveDelta:
        """Find out where the elements of `delta` live on this rank. Nothing is changed.

        Raises:
            CommitError: They cannot be put there.
        """
        if self._writer is None or self._writer.plan is None or not self.takes_deltas:
            raise CommitError(
                f"version {delta.version} is a delta, and {self._part} has not loaded a full version by copies.",
                part=self._part,
            )
        return LiveDelta(self._writer.plan, delta, self._writer.renew_derived)

    def needed(self) -> Placement | None:
        """What this rank has to get of versions of the tensors that it has learned; None if that is everything."""
        if self.plan is not None:
            return needed_placement(needed_boxes(self.plan.layout), self._signature)
        return None if self._read is None else needed_placement(self._read, self._signature)

    def learn_for(self, tensors: Mapping[str, torch.Tensor], group: RankGroup) -> None:
        """`learn` for a version that has come; nothing of one that is made when it is asked for is made."""
        self.learn(_signature_of(tensors), group, sliced=isinstance(tensors, SlicedTensors))

    def write(self, tensors: Mapping[str, torch.Tensor]) -> Way:
        """Replace every weight of the model by `tensors` (Hugging Face names, full shapes), as learned for them, in place.

        On a CUDA device the copies are queued on the current stream when this returns.

        Raises:
            CommitError: On a rank where it failed: its model may be partly old and partly new, and must not serve until a
                version was loaded completely.
        """
        assert self._writer is not None, "learned"
        assert self._verdict is not None, "as above"
        self._writer.load(tensors)
        return self._verdict.way

    def load_pieces(self, pieces: Iterator[LivePart]) -> Way:
        """As `write`, for a version that comes in pieces, of which one is kept at a time.

        Raises:
            WeightlaneError: What `pieces` raised, or `CommitError` as `write`.
        """
        assert self._writer is not None, "see learn"
        assert self._verdict is not None, "as above"
        self._writer.load_pieces(pieces)
        return self._verdict.way

    def learn(self, signature: Mapping[str, SourceSpec], group: RankGroup, *, sliced: bool = False) -> None:
        """Find out how versions of these tensors are written, and show that it is right, unless that is known.

        Nothing is changed. Until the model serves there is room to show it; later, for other tensors, there may be none.

        Args:
            signature: The tensors.
            group: The ranks.
            sliced: Whether slices of a version have come: those that were `needed` before.

        Raises:
            ConfigError: They cannot be written right.
            CommitError: Slices have come, and others would be needed.
        """
        known = signature == self._signature and self._writer is not None and not self._writer.moved()
        # Nothing is said where all is well, which costs one small message.
        if not any(group.exchange(None if known else True)):
            return
        if self._writer is not None and signature == self._signature:
            logger.info("weightlane: parameters have moved, %s learns anew where weights go", self._part)
        came = _slices_of(self.needed())
        self._signature, self._writer = dict(signature), None
        judged = self._judged(group)
        shown = self._shown(judged)
        known_right = all(group.exchange(shown is not None))
        verdict = shown if known_right and shown is not None else self._rehearse(judged, group)
        self._verdict = verdict
        self._writer = VersionWriter(
            self._model,
            self._config,
            self._device,
            verdict,
            self._signature,
            self._left_behind,
            part=self._part,
        )
        if any(group.exchange(sliced and _slices_of(self.needed()) != came)):
            raise CommitError(
                "slices of a version have come, and others are needed: parameters have moved, or other tensors are sent.",
                part=self._part,
                hint="Connect this replica anew; it asks for what it needs then.",
            )

    def _shown(self, verdict: Verdict) -> Verdict | None:
        """How versions like these were shown to be written right, if perhaps in other types or with a tied tensor's copy.

        Copies are those that were shown, and convert as vLLM's own loading does. Where they gave way to that, they do again.
        """
        if self._rehearsed is None:
            return None
        (signature, judged, shown), names = self._rehearsed, self._tied
        shapes = [
            {names.get(name, name): spec.shape for name, spec in each.items()} for each in (signature, self._signature)
        ]
        ways = [(each.way, each.modules, each.derived, each.layout.copies(names)) for each in (judged, verdict)]
        if shapes[0] != shapes[1] or ways[0] != ways[1]:
            return None
        return verdict if shown is judged else shown

    def _rehearse(self, verdict: Verdict, group: RankGroup) -> Verdict:
        """`verdict`, or the one that versions go through vLLM's own loading, if that is shown to be right."""
        began, judged = time.perf_counter(), verdict
        rehearsal = Rehearsal(
            self._model,
            self._config,
            self._device,
            self._signature,
            group,
            part=self._part,
            computes=self._computes,
            may_move=self._rehearsed is None,  # the first time is before the model serves
        )
        trouble: str | None = None
        while True:
            self._read = self._read_by_loading() if verdict.way is Way.RELOAD else None
            trouble = rehearsal.trouble_with(verdict, self._read)
            if trouble is not None and any(group.exchange(self._read is not None)):
                logger.warning("weightlane: %s needs every tensor whole: %s", self._part, trouble)
                self._read = None
                trouble = rehearsal.trouble_with(verdict, None)
            if trouble is None or verdict.way is Way.RELOAD:
                break
            logger.warning("weightlane: versions go through vLLM's own loading: %s", trouble)
            verdict = whole_reload([*verdict.reasons, Refusal("the model", trouble)])
        if trouble is not None:
            raise ConfigError(
                f"new versions of this model would not be right: {trouble}.",
                part=self._part,
                hint="docs/reference/models.md has the models that take versions. This one can only be served as it is.",
            )
        self._left_behind = rehearsal.left_behind
        self._rehearsed = self._signature, judged, verdict
        logger.info(
            "weightlane: versions are written as an ordinary load would (%s), seen in %.3f s",
            verdict.way,
            time.perf_counter() - began,
        )
        return verdict

    def _read_by_loading(self) -> dict[str, list[Box]] | None:
        try:
            boxes = read_by_loading(self._model, self._signature)
        except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; the rank asks for whole tensors then
            logger.warning(
                "weightlane: %s needs every tensor whole: %s: %s",
                self._part,
                type(cause).__name__,
                str(cause)[:200],
            )
            return None
        whole = [name for name, spec in self._signature.items() if boxes[name] == [Box.whole(spec.shape)]]
        logger.info(
            "weightlane: vLLM's own loading reads slices of %d tensors, and %d whole: %s",
            len(boxes) - len(whole),
            len(whole),
            ", ".join(whole),
        )
        return boxes

    def _judged(self, group: RankGroup) -> Verdict:
        began = time.perf_counter()
        layout: LayoutMap | None = None
        fact: dict[str, Any] = {}
        try:
            layout = trace_loading(self._model, self._signature)
            fact["layout"] = layout.to_plain()
        except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; the version is loaded without copies then
            fact["error"] = untraceable(cause).why
        facts = group.exchange(fact)
        errors = [fact["error"] for fact in facts if "error" in fact]
        if errors or layout is None:
            verdict = whole_reload([Refusal("the model", error) for error in errors])
        else:
            verdict = judge(
                self._model, layout, [LayoutMap.from_plain(fact["layout"]) for fact in facts], tied=self._tied
            )
        if verdict.way is Way.RELOAD:
            logger.warning("weightlane: versions go through vLLM's own loading: %s", verdict.summary)
        elif verdict.way is Way.MIXED:
            logger.warning(
                "weightlane: %s go through vLLM's own loading, the rest is copied: %s",
                ", ".join(verdict.modules),
                verdict.summary,
            )
        agreed = self._agreed(verdict, group)
        logger.info(
            "weightlane: %s: %d copies of %.1f MB, learned in %.3f s",
            agreed.way,
            len(agreed.layout.slices),
            agreed.layout.bytes_copied / 1e6,
            time.perf_counter() - began,
        )
        return agreed

    def _agreed(self, verdict: Verdict, group: RankGroup) -> Verdict:
        """A whole reload unless no rank needs one: ranks must not differ in what the version's first load consists of."""
        reasons = [fact for fact in group.exchange(verdict.summary if verdict.way is Way.RELOAD else None) if fact]
        return (
            whole_reload([Refusal("the model", reasons[0])]) if reasons and verdict.way is not Way.RELOAD else verdict
        )


def _slices_of(needed: Placement | None) -> dict[str, tuple[Box, ...]] | None:
    """Of each tensor, in whatever type it comes."""
    return (
        None if needed is None else {spec.name: boxes for spec, boxes in zip(needed.specs, needed.boxes, strict=True)}
    )


def _signature_of(tensors: Mapping[str, torch.Tensor]) -> _Signature:
    return {name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in without_data(tensors).items()}
