"""`VersionLoader`: writes complete versions into a live vLLM model, by copies where these are proven to be right.

The write method is chosen and proven before the model serves, on a second model that never serves: see `rehearsal`. If copies are
not right, versions go through vLLM's own loading; if that is not right either, versions are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.logger import init_logger

from weightlane.ckpt_engines import CommitError, ConfigError, QuarantinedError
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.sync import Expectation, IncomingDelta, LivePart, Placement
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import is_computed

from ..contract.loader import RankLoader, ShapeAndDtype
from ..contract.rank_group import RankGroup
from .loading.derived import StaleView
from .loading.model_errors import hint_for
from .map.coverage import Reads, target_coverage
from .map.layout_map import LayoutMap, Refusal, SourceSpec
from .map.needs import needed_boxes, needed_placement
from .proof.rehearsal import Rehearsal
from .rank_model import RankModel
from .trace.loading_reads import read_by_loading, unread_by_loading
from .trace.trace import trace_loading
from .write.commit_plan import CommitPlan
from .write.live_delta import LiveDelta
from .write.version_writer import VersionWriter
from .write_method import WriteKind, WriteMethod, choose_write_method, full_reload, untraceable

logger = init_logger("vllm.weightlane")

_Signature = dict[str, SourceSpec]
"""Shape and dtype of every tensor of a version."""


class VersionLoader(RankLoader):
    """Loads versions into one rank's vLLM model. All ranks make every call together, inside vLLM's current config.

    The `expectation` has the tensors of the checkpoint that the model was started from.
    """

    def __init__(self, rank: RankModel, *, expectation: Expectation | None = None) -> None:
        self._rank, self.part, self.device = rank, rank.part, rank.device
        self._captured: dict[str, int] | None = None
        """The addresses of all tensors, which captured CUDA graphs read. None for an engine that captures none, and until the
        first update: layers may move some tensors before the model serves."""
        self.expectation = expectation or Expectation({})
        """The tensors that a version has to have. Once `learn` has returned, these are the tensors that some rank reads."""
        self._of_files = self.expectation
        self._optional: _Signature = {}
        """The checkpoint's tensors that versions need not have: second names, and those that no rank reads."""
        self._left_out: frozenset[str] = frozenset()
        """Tensors of versions of this signature that are not written: no rank reads them."""
        self._signature: _Signature = {}
        self.method: WriteMethod | None = None
        """How versions of the last learned signature are written; None before `learn`."""
        self._writer: VersionWriter | None = None
        """None until writing versions with this signature is proven to be right."""
        self._proven: tuple[_Signature, WriteMethod, WriteMethod] | None = None
        """The last rehearsed signature, the method that `choose_write_method` chose, and the one that was proven to be right."""
        self._stale_views: Sequence[StaleView] = ()
        self._names: Mapping[str, str] = {}
        """The checkpoint's name of each tensor of the signature that has another one."""
        self._read: dict[str, list[Box]] | None = None
        """The boxes that a full reload reads, by the checkpoint's names; None if versions are copied, or if a reload needs whole
        tensors."""

    @property
    def plan(self) -> CommitPlan | None:
        """The copies of a version; None if no tensor is copied, and before `learn`."""
        return None if self._writer is None else self._writer.plan

    def replaced_storages(self) -> dict[int, torch.UntypedStorage]:
        """The memory of which every version writes every byte, by torch's id of the storage.

        Tensors that go through vLLM's own loading do not count, nor does a storage that is larger than what is written.
        """
        if self.plan is None:
            return {}
        live = dict((*self._rank.model.named_parameters(), *self._rank.model.named_buffers()))
        found = {}
        for name, counts in target_coverage(self.plan.layout).items():
            storage = live[name].untyped_storage()
            if not counts.unmapped and storage.nbytes() == live[name].numel() * live[name].itemsize:
                found[storage._cdata] = storage
        return found

    @property
    def takes_deltas(self) -> bool:
        """Whether changed elements can be written straight into the parameters: every weight is copied, and none is rounded."""
        if self.plan is None or self.method is None or self.method.kind is not WriteKind.TRACED:
            return False
        return self.plan.keeps_sent_bits

    def live_delta(self, delta: IncomingDelta) -> LiveDelta:
        """Locate the elements of `delta` on this rank. Nothing is changed.

        Raises:
            CommitError: The elements cannot be written into the parameters.
        """
        if self._writer is None or self.plan is None or not self.takes_deltas:
            why = f"version {delta.version} is a delta, and {self._rank.part} has not loaded a full version by copies."
            raise CommitError(why, part=self._rank.part)
        return LiveDelta(self.plan, delta, self._writer.renew_derived, self._left_out)

    def needed(self) -> Placement | None:
        """The slices that this rank needs of versions with the learned signature; None if it needs all tensors completely."""
        boxes = self._read_as_sent() if self.plan is None else needed_boxes(self.plan.layout)
        if boxes is None:
            return None
        return needed_placement(boxes | {name: [] for name in self._optional}, self._signature | self._optional)

    def _read_as_sent(self) -> dict[str, list[Box]] | None:
        """`_read` by the names of the signature."""
        return None if self._read is None else {name: self._read[self._own(name)] for name in self._signature}

    def _own(self, name: str) -> str:
        """The checkpoint's name of a tensor of the signature."""
        return self._names.get(name, name)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a version with the learned signature; see `VersionWriter.write`."""
        assert self._writer is not None, "learned"
        self._writer.write(tensors)

    def write_arriving(self, parts: Iterator[LivePart]) -> None:
        """Write a version with the learned signature while it arrives; see `VersionWriter.write_arriving`."""
        assert self._writer is not None, "learned"
        self._writer.write_arriving(parts)

    def before_update(self) -> None:
        """Note where captured CUDA graphs read the weights."""
        if self._captured is None and _captures_graphs(self._rank.config):
            self._captured = dict(_addresses(self._rank.model))

    def settle(self) -> None:
        """Wait until the device has written everything: the ranks then agree on what is so, and staging memory is used again.

        Raises:
            QuarantinedError: A tensor has moved away from where captured graphs read it: by a layer that replaces a parameter
                instead of filling it. Nothing would compute with the version.
        """
        if runtime_of(self.device).has_streams:
            torch.accelerator.synchronize(self.device)  # not one stream: layers may use their own
        here = {} if self._captured is None else dict(_addresses(self._rank.model))
        moved = [name for name, address in (self._captured or {}).items() if here.get(name) != address]
        if moved:
            raise QuarantinedError(
                f"{moved[0]} and {len(moved) - 1} more tensors have moved to other memory, and captured CUDA graphs compute with"
                " the memory from before.",
                part=self.part,
                hint="Start this replica anew; with rollout.enforce_eager (vLLM's --enforce-eager) tensors may move.",
            )

    def learn(self, specs: Mapping[str, ShapeAndDtype], group: RankGroup, *, sliced: bool = False) -> None:
        """Find out how versions with these tensors are written, and prove that this is right, unless that is known.

        The model is not changed. A proof needs room for a second model, which there may not be once the model serves.

        Args:
            specs: Shape and dtype of every tensor; those of the checkpoint when this is called first.
            group: The ranks.
            sliced: Whether the slices that were `needed` before have been received of a version.

        Raises:
            ConfigError: No write method is right.
            CommitError: Slices have been received, and now others are needed.
        """
        signature = {name: SourceSpec(tuple(each.shape), each.dtype) for name, each in specs.items()}
        first = self._proven is None
        if first:
            self._find_unread(signature, group)
        try:
            self._learn(signature, group, sliced=sliced)
        except ConfigError as error:
            if not first or not self.expectation.unread:
                raise
            logger.warning(
                "weightlane: tensors that no rank seems to read are required, too: %s",
                error,
            )
            self._require_everything()
            self._learn(signature, group, sliced=sliced)

    def _learn(self, signature: Mapping[str, SourceSpec], group: RankGroup, *, sliced: bool) -> None:
        """See `learn`."""
        names = self.expectation.own_names(signature.keys())
        written = {
            name: spec
            for name, spec in signature.items()
            if names.get(name, name) not in self._optional and not is_computed(name)
        }
        self._left_out, signature = frozenset(signature.keys() - written.keys()), written
        known = signature == self._signature and self._writer is not None and not self._writer.moved()
        # A rank that has nothing to learn sends nothing, which keeps this to one small message.
        if not any(group.gather(None if known else True)):
            return
        if self._writer is not None and signature == self._signature:
            logger.info("weightlane: parameters have moved to other memory, %s traces loading again", self._rank.part)
        received = _needed_slices(self.needed(), self.expectation)
        self._signature, self._names, self._writer = dict(signature), names, None
        chosen = self._choose(group)
        proven = self._known_proof(chosen)
        proven_everywhere = all(group.gather(proven is not None))
        self.method = proven if proven_everywhere and proven is not None else self._prove(chosen, group)
        self._writer = VersionWriter(self._rank, self.method, self._signature, self._stale_views, self._read_as_sent())
        if any(group.gather(sliced and _needed_slices(self.needed(), self.expectation) != received)):
            raise CommitError(
                "slices of a version were received, and others are needed: parameters have moved to other memory, or the"
                " trainer sends other tensors.",
                part=self._rank.part,
                hint="Connect this replica again; it then asks for the slices that it needs.",
            )

    def _find_unread(self, signature: Mapping[str, SourceSpec], group: RankGroup) -> None:
        """Find the tensors of the checkpoint that a version need not have, and take them out of `expectation`."""
        tied = self.expectation.tied
        mine = unread_by_loading(self._rank.model, signature) - tied.keys()
        unread = frozenset.intersection(*map(frozenset, group.gather(sorted(mine))))
        if unread:
            some = ", ".join(sorted(unread)[:6])
            logger.info("weightlane: no rank reads %d tensors of the checkpoint, such as %s", len(unread), some)
        self._optional = {name: spec for name, spec in signature.items() if name in unread or name in tied}
        tensors = {name: each for name, each in self._of_files.tensors.items() if name not in unread}
        self.expectation = replace(self._of_files, tensors=tensors, unread=unread)

    def _require_everything(self) -> None:
        """Make every tensor of the checkpoint required: one that no rank seemed to read does matter."""
        self.expectation = self._of_files
        self._optional = {name: spec for name, spec in self._optional.items() if name in self._of_files.tied}

    def _choose(self, group: RankGroup) -> WriteMethod:
        """Trace loading on every rank, and choose a write method: a full reload on all ranks or on none."""
        began = time.perf_counter()
        layout: LayoutMap | None = None
        fact: dict[str, Any] = {}
        try:
            layout = trace_loading(self._rank.model, self._signature)
            fact["reads"] = Reads.of(layout).to_plain()
        except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; the version is then loaded without copies
            fact["error"] = untraceable(cause).why
        facts = group.gather(fact)
        errors = [fact["error"] for fact in facts if "error" in fact]
        if errors or layout is None:
            method = full_reload([Refusal("the model", error) for error in errors])
        else:
            reads = [Reads.from_plain(fact["reads"]) for fact in facts]
            method = choose_write_method(self._rank.model, layout, reads)
        if method.kind is WriteKind.RELOAD:
            logger.warning("weightlane: versions go through vLLM's own loading: %s", method.summary)
        elif method.kind is WriteKind.MIXED:
            layers = ", ".join(method.reloaded_layers)
            logger.warning(
                "weightlane: %s go through vLLM's own loading, the rest is copied: %s", layers, method.summary
            )
        # Ranks must not differ in which tensors vLLM's own loading gets.
        reloads = group.gather(method.summary if method.kind is WriteKind.RELOAD else None)
        reason = next((summary for summary in reloads if summary), None)
        if reason is not None and method.kind is not WriteKind.RELOAD:
            method = full_reload([Refusal("the model", reason)])
        logger.info(
            "weightlane: %s: %d copies of %.1f MB, traced in %.3f s",
            method.kind,
            len(method.layout.copies),
            method.layout.bytes_copied / 1e6,
            time.perf_counter() - began,
        )
        return method

    def _known_proof(self, method: WriteMethod) -> WriteMethod | None:
        """The proven method for versions that differ from the rehearsed ones only in dtypes and names.

        The copies are those that were proven, and convert dtypes as vLLM's own loading does. Where the rehearsal replaced
        copies by a reload, versions are reloaded again.
        """
        if self._proven is None:
            return None
        signature, chosen, proven = self._proven
        shapes, choices = (
            [{self._own(name): spec.shape for name, spec in each.items()} for each in (signature, self._signature)],
            [
                (each.kind, each.reloaded_layers, each.derived, each.layout.comparable(self._names))
                for each in (chosen, method)
            ],
        )
        if shapes[0] != shapes[1] or choices[0] != choices[1]:
            return None
        return method if proven is chosen else proven

    def _prove(self, chosen: WriteMethod, group: RankGroup) -> WriteMethod:
        """Rehearse `chosen`, then a full reload; returns the first method that is right. Raises `ConfigError` if none is."""
        began, method = time.perf_counter(), chosen
        before_serving = self._proven is None
        rehearsal = Rehearsal(
            self._rank,
            self._signature,
            group,
            may_move=before_serving,
            optional=self._optional,
            tied=self.expectation.tied,
        )
        while True:
            read = self._read_by_loading() if method.kind is WriteKind.RELOAD else None
            mismatch = rehearsal.first_mismatch(method, read)
            if mismatch is not None and any(group.gather(read is not None)):
                logger.warning("weightlane: %s needs every tensor whole: %s", self._rank.part, mismatch)
                read = None
                mismatch = rehearsal.first_mismatch(method, None)
            if mismatch is None or method.kind is WriteKind.RELOAD:
                break
            logger.warning("weightlane: versions go through vLLM's own loading: %s", mismatch)
            method = full_reload([*method.reasons, Refusal("the model", mismatch)])
        if mismatch is not None:
            raise ConfigError(
                f"new versions of this model would not be right: {mismatch}.",
                part=self._rank.part,
                hint=hint_for(mismatch)
                or 'The documentation\'s page "Which models take versions" lists them. This one can only be served as it is.',
            )
        self._read = None if read is None else {self._own(name): boxes for name, boxes in read.items()}
        self._stale_views = rehearsal.stale_views
        self._proven = self._signature, chosen, method
        logger.info(
            "weightlane: a rehearsed version equals an ordinary load (%s), shown in %.3f s",
            method.kind,
            time.perf_counter() - began,
        )
        return method

    def _read_by_loading(self) -> dict[str, list[Box]] | None:
        try:
            boxes = read_by_loading(self._rank.model, self._signature)
        except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; the rank then asks for whole tensors
            said = f"{type(cause).__name__}: {str(cause)[:200]}"
            logger.warning("weightlane: %s needs every tensor whole: %s", self._rank.part, said)
            return None
        whole = [name for name, spec in self._signature.items() if boxes[name] == [Box.whole(spec.shape)]]
        logger.info(
            "weightlane: vLLM's own loading reads slices of %d tensors, and %d whole: %s",
            len(boxes) - len(whole),
            len(whole),
            ", ".join(whole),
        )
        return boxes


def _captures_graphs(vllm_config: Any) -> bool:
    """Whether an engine with this configuration captures CUDA graphs."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


def _addresses(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    for kind in (model.named_parameters, model.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            if tensor.numel():
                yield name, tensor.data_ptr()


def _needed_slices(needed: Placement | None, expectation: Expectation) -> dict[str, tuple[Box, ...]] | None:
    """The boxes of each tensor, whatever its dtype, by its name in the checkpoint."""
    if needed is None:
        return None
    names = expectation.own_names([spec.name for spec in needed.specs])
    return {names.get(spec.name, spec.name): boxes for spec, boxes in zip(needed.specs, needed.boxes, strict=True)}
