"""`VersionLoader`: puts complete versions into a live vLLM model, by copies where these are known to be right.

The first version shows whether they are. Something else is loaded through vLLM's own loading, the version is committed by copies
over it, and then the version is loaded through vLLM's own loading too: parameters must be equal bit for bit, and so must be what
every layer computes. Whatever comes out, the version is in place as vLLM itself would have put it there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger

from weightlane.ckpt_engines import CommitError, WeightlaneError
from weightlane.sync import IncomingDelta, Piece, Placement, SlicedTensors
from weightlane.sync.boxes import Box
from weightlane.sync.checksum import sums
from weightlane.sync.made_tensors import without_data
from weightlane.sync.manifest import Slicing
from weightlane.sync.sliced import Pieces

from ..agreement import RankGroup
from ..weight_loading import load_version
from .acceptance import Verdict, Way, judge, untraceable, whole_reload
from .commit_plan import CommitPlan
from .equal_compute import OtherValues, first_difference, layer_digests
from .layout_map import LayoutMap, Refusal, SourceSpec
from .live_delta import LiveDelta
from .loading_form import OnlyRead, read_by_loading
from .needs import needed_boxes, needed_placement
from .partial_reload import reload_layers
from .sliced_layout import sliced_layout
from .trace import trace_loading

logger = init_logger("vllm.weightlane")

_Signature = dict[str, SourceSpec]
_PARTS = 3


class VersionLoader:
    """Loads versions into one rank's model. Every call is made by all ranks together, inside vLLM's current config.

    Args:
        model: The live model.
        vllm_config: vLLM's configuration.
        device: Device of the model.
        part: Name of this rank for error messages.
        tied: Checkpoint names that loading may ignore, since they are another tensor under a second name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
        *,
        part: str,
        tied: Collection[str] = (),
    ) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._part = part
        self._tied = tied
        self._signature: _Signature = {}
        self._verdict: Verdict | None = None
        self._plan: CommitPlan | None = None
        self._shown = False
        self._read: dict[str, list[Box]] | None = None
        """What vLLM's own loading reads of versions that go through it; None where that is not known."""
        self._read_shown = False
        """Whether nothing else of a version changes what it loads."""
        self._sliced: tuple[Slicing, CommitPlan] | None = None
        """The copies of versions that come in the same slices as the last one."""

    @property
    def verdict(self) -> Verdict | None:
        """What was decided about the versions that come; None before the first."""
        return self._verdict

    @property
    def plan(self) -> CommitPlan | None:
        """The copies of a version, for what goes by copies; None where nothing does, and before the first version."""
        return self._plan

    @property
    def takes_deltas(self) -> bool:
        """Whether changed elements can be put straight into the parameters: every weight goes by copies, and that was shown."""
        return self._shown and self._verdict is not None and self._verdict.way is Way.TRACED

    def live_delta(self, delta: IncomingDelta) -> LiveDelta:
        """Find out where the elements of `delta` live on this rank. Nothing is changed.

        Raises:
            CommitError: They cannot be put there.
        """
        if self._plan is None or not self.takes_deltas:
            raise CommitError(
                f"version {delta.version} is a delta, and {self._part} has not loaded a full version by copies.",
                part=self._part,
            )
        return LiveDelta(self._plan, delta)

    def needed(self) -> Placement | None:
        """What this rank has to get of versions of the tensors that it was `proven` for; None if that is everything."""
        if self._plan is not None and self._shown:
            return needed_placement(needed_boxes(self._plan.layout), self._signature)
        if self._read is not None and self._read_shown:
            return needed_placement(self._read, self._signature)
        return None

    def load(self, tensors: Mapping[str, torch.Tensor], group: RankGroup) -> Way:
        """Replace every weight of the model by `tensors` (Hugging Face names, full shapes), in place.

        On a CUDA device the copies are queued on the current stream when this returns.

        Raises:
            CommitError: On a rank where it failed: its model may be partly old and partly new, and must not serve until a
                version was loaded completely.
        """
        self._prepare(_signature_of(tensors), group)
        assert self._verdict is not None, "prepared"
        lacks = isinstance(tensors, SlicedTensors) and not self._shown and not self._has_all(tensors)
        if not self._shown and self._verdict.way is not Way.RELOAD:
            lacks = any(group.exchange(lacks))  # ranks that went on would wait for this one
        if lacks:
            raise CommitError(
                "slices of a version have come, and it is not known any more where they go: parameters have moved.",
                part=self._part,
                hint="Connect this replica anew; it asks for what it needs then.",
            )
        if self._verdict.way is Way.RELOAD:
            self._reload(tensors)
        elif self._shown:
            self._commit(tensors)
        else:
            self._show(tensors, group, lambda: self._commit(tensors))
        return self._verdict.way

    def _has_all(self, tensors: SlicedTensors) -> bool:
        """Whether everything that vLLM's own loading reads has come."""
        read = self._read or {}
        return all(tensors.has(name, read.get(name, [Box.whole(spec.shape)])) for name, spec in self._signature.items())

    def proven(self, signature: Mapping[str, SourceSpec], group: RankGroup, *, whole: bool) -> bool:
        """Find out how versions of these tensors go. Nothing is written.

        Returns whether that has been shown to be right. If not, `prove` has to, before `load_pieces`. What goes through vLLM's
        own loading is right as long as `whole` tensors come.
        """
        self._prepare(dict(signature), group)
        assert self._verdict is not None, "prepared"
        if self._verdict.way is not Way.RELOAD:
            return self._shown
        return whole or self._read_shown or not any(group.exchange(self._read is not None))

    def holds_as_sent(self, name: str) -> bool:
        """Whether all parameters that a tensor goes to have the type in which it is sent, as far as that is known."""
        return self._plan is not None and self._plan.layout.holds_as_sent(name)

    def prove(self, tensors: Mapping[str, torch.Tensor], group: RankGroup) -> None:
        """Show it with `tensors`, which are loaded as a first version is, in pieces; they may be made when they are asked for.

        Raises:
            CommitError: As `load`.
        """
        if self._verdict is not None and self._verdict.way is Way.RELOAD:
            self._show_read(tensors, group)
        else:
            self._show(tensors, group, lambda: self.load_pieces(_pieces_of(tensors)))

    def load_pieces(self, pieces: Iterator[Piece]) -> Way:
        """As `load`, for a version that comes in pieces, of which one is kept at a time.

        What goes through vLLM's own loading is put together first: all of it where the rest is copied, else a tensor at a time
        until vLLM has a layer complete. Call `proven`, and `prove` if need be, before.

        Raises:
            WeightlaneError: What `pieces` raised, or `CommitError` as `load`.
        """
        assert self._verdict is not None, "see proven"
        if self._verdict.way is Way.RELOAD:
            self._reload_arriving(pieces)
            return self._verdict.way
        assert self._plan is not None, "a version goes by copies"
        self._plan.fill()
        apart: dict[str, torch.Tensor] = {}
        for piece in pieces:
            if piece.name not in self._verdict.sources:
                self._plan.write_part(piece.name, piece.start, piece.values)
                self._settle_copies()
                continue
            collect(piece, self._signature[piece.name], apart, self._device)
        for name in self._verdict.sources - apart.keys():
            apart[name] = torch.empty(self._signature[name].shape, dtype=self._signature[name].dtype)
        if self._verdict.modules:
            self._reload_layers(apart)
        return self._verdict.way

    def _reload_arriving(self, pieces: Iterator[Piece]) -> None:
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
            load_version(self._model, self._config.model_config, arriving, part=self._part)
        except CommitError as error:
            raise (failure[0] if failure else error) from error
        for _ in arriving:  # Loading need not look at everything, but the sender must get rid of it.
            pass

    def _settle_copies(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # The piece's memory is received into as soon as it is dropped.

    def _prepare(self, signature: _Signature, group: RankGroup) -> None:
        """Trace and judge, unless every rank still has what it learned from a version like this one."""
        same = self._verdict is not None and signature == self._signature
        known = same and not (self._plan is not None and self._plan.moved())
        # Nothing is said where all is well, which costs one small message.
        if not any(group.exchange(None if known else True)):
            return
        if same:
            logger.info("weightlane: parameters have moved, %s learns anew where weights go", self._part)
        self._signature, self._plan, self._shown, self._sliced = signature, None, False, None
        self._read, self._read_shown = None, False
        self._verdict = self._judged(group)
        if self._verdict.way is Way.RELOAD:
            self._read = self._read_by_loading()
        else:
            self._plan = CommitPlan(self._verdict.layout, self._model)

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

    def _commit_slices(self, tensors: SlicedTensors, plan: CommitPlan) -> None:
        known = self._sliced
        if known is None or known[0] is not tensors.slicing:
            sliced = CommitPlan(sliced_layout(plan.layout, tensors.regions), self._model)
            known = self._sliced = tensors.slicing, sliced
        staged, sources = tensors.staged, known[1].sources
        known[1].commit(staged if all(name in staged for name in sources) else Pieces(tensors, sources))

    def _commit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._plan is not None, "a version goes by copies"
        assert self._verdict is not None, "as above"
        if isinstance(tensors, SlicedTensors):
            self._commit_slices(tensors, self._plan)
        else:
            self._plan.commit(tensors)
        if self._verdict.modules:
            self._reload_layers(tensors)

    def _reload_layers(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._verdict is not None, "a version goes by copies"
        reload_layers(
            self._model,
            self._config.model_config,
            tensors,
            modules=self._verdict.modules,
            sources=self._verdict.sources,
            part=self._part,
        )

    def _reload(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load by vLLM's own loading; of slices each tensor as far as it has come, which is all that is read."""
        if isinstance(tensors, SlicedTensors):
            come = ((name, tensors.partly(name)) for name in tensors)
            load_version(self._model, self._config.model_config, come, part=self._part)
        else:
            load_version(self._model, self._config.model_config, tensors, part=self._part)

    def _show(self, tensors: Mapping[str, torch.Tensor], group: RankGroup, commit: Callable[[], object]) -> None:
        """See the module's docstring. Each rank takes part in every exchange, whatever has failed on it."""
        assert self._plan is not None, "there is something to show"
        began = time.perf_counter()

        def overwrite_and_commit() -> None:
            self._reload(OtherValues(tensors))
            commit()

        trouble = self._beside_whole(
            tensors, group, overwrite_and_commit, self._compute, partial(self._compare, tensors)
        )
        if self._verdict is None:
            return
        if trouble is None:
            self._shown = True
            logger.info(
                "weightlane: copies give what vLLM's loading gives, seen in %.3f s", time.perf_counter() - began
            )
            return
        logger.warning("weightlane: versions go through vLLM's own loading: %s", trouble)
        self._verdict, self._plan = whole_reload([Refusal("the model", trouble)]), None
        self._read, self._read_shown = self._read_by_loading(), False

    def _show_read(self, tensors: Mapping[str, torch.Tensor], group: RankGroup) -> None:
        """Load what vLLM's own loading is thought to read, and then all of it: the model must be the same, bit for bit."""

        def load_read() -> None:
            self._reload(OnlyRead(tensors, self._read or {}))

        trouble = self._beside_whole(tensors, group, load_read, self._hold_and_compute, self._compare_read)
        if trouble is None:
            self._read_shown = self._verdict is not None
            return
        logger.warning("weightlane: %s needs every tensor whole: %s", self._part, trouble)
        self._read = None

    def _beside_whole(
        self,
        tensors: Mapping[str, torch.Tensor],
        group: RankGroup,
        first: Callable[[], None],
        look: Callable[[], dict[str, str]],
        compare: Callable[[dict[str, str], dict[str, str]], None],
    ) -> str | None:
        """Do `first`, load `tensors` whole, and `compare` how the model `look`s after either; what some rank says against it.

        The verdict is None afterwards if another rank could not load.
        """
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        trouble = self._step(group, first)
        if trouble is None:
            trouble = self._step(group, lambda: before.update(look()))
        failure: WeightlaneError | None = None
        try:
            self._reload(tensors)
        except WeightlaneError as error:
            failure = error
        if any(group.exchange(failure is not None)):
            self._verdict = None  # The next version begins anew.
            if failure is not None:
                raise failure
            return None
        if trouble is None:
            trouble = self._step(group, lambda: after.update(look()))
        return self._step(group, lambda: compare(before, after)) if trouble is None else trouble

    def _compare_read(self, sliced: Mapping[str, str], whole: Mapping[str, str]) -> None:
        if (name := first_difference(sliced, whole)) is not None:
            raise CommitError(f"loading reads more of {name or 'the model'} than was seen", part=self._part)

    def _hold_and_compute(self) -> dict[str, str]:
        """What the model gives for a few tokens, and, since these do not meet all of it, the bits of its parameters."""
        bits = {
            f"the parameter {name}": sums(held.detach().reshape(-1).clone().view(torch.uint8))
            for name, held in self._model.named_parameters()
        }
        return bits | self._compute()

    def _compute(self) -> dict[str, str]:
        return layer_digests(self._model, self._config, self._device)

    def _compare(
        self, tensors: Mapping[str, torch.Tensor], copied: Mapping[str, str], loaded: Mapping[str, str]
    ) -> None:
        assert self._plan is not None, "there is something to compare"
        if differing := self._plan.differing(tensors):
            raise CommitError(f"loading leaves something else than copies in {differing[0]}", part=self._part)
        if (layer := first_difference(copied, loaded)) is not None:
            raise CommitError(
                f"{layer or 'the model'} does not compute from its parameters alone, or not the same twice",
                part=self._part,
            )

    def _step(self, group: RankGroup, step: Callable[[], None]) -> str | None:
        """What the first rank on which `step` failed says of it."""
        said: str | None = None
        try:
            step()
        except WeightlaneError as error:
            said = error.message
        except Exception as cause:  # noqa: BLE001 - other ranks wait; without proof there are no copies
            said = f"they cannot be compared with copies: {type(cause).__name__}: {str(cause)[:200]}"
        return next((fact for fact in group.exchange(said) if fact), None)


def collect(piece: Piece, spec: SourceSpec, apart: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put a piece into the tensor of its name in `apart`."""
    if (whole := apart.get(piece.name)) is None:
        whole = apart[piece.name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
    whole.view(-1)[piece.start : piece.start + piece.values.numel()].copy_(piece.values)


def _pieces_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
    """A version in pieces of which some are not whole rows."""
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        length = flat.numel() // _PARTS + 1
        for start in range(0, flat.numel(), length):
            yield Piece(name, start, flat[start : start + length])


def _signature_of(tensors: Mapping[str, torch.Tensor]) -> _Signature:
    return {name: SourceSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in without_data(tensors).items()}
