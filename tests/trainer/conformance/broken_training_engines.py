"""Training engines that are wrong in one way each: the template with one planted fault."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from weightlane_training_engine_template import TemplateTrainingEngine

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync import LocalShard, TensorSpec
from weightlane.trainer import engine_toolkit as toolkit

Fence = Callable[[Collection[str]], None]
Engine = TypeVar("Engine", bound=type[TemplateTrainingEngine])

DEFECTS: dict[str, tuple[str, str, int]] = {}
"""Engine to the check that catches it, with its model or case, a pattern for its error, and the ranks that it needs."""


def caught_by(check: str, complaint: str, ranks: int = 1) -> Callable[[Engine], Engine]:
    """Decorates each engine. `check` may name a model or case in brackets."""
    name, _, case = check.rstrip("]").partition("[")

    def note(engine: Engine) -> Engine:
        DEFECTS[engine.__name__] = f"test_{name}[as set{case and '-'}{case}]", complaint, ranks
        return engine

    return note


@caught_by("outputs_are_those_of_transformers[qwen3]", "logprobs of a sequence of .* off")
class IgnoresTemperature(TemplateTrainingEngine):
    """Logits are taken as they are."""

    def _outputs(self, micro: toolkit.MicroBatch, top_k: int = 0) -> toolkit.ModelOutputs:
        return super()._outputs(replace(micro, per_sequence={}), top_k)


@caught_by("every_label_of_a_position_has_its_log_probability", "logprobs of a seq.* off")
class TakesTheFirstLabel(TemplateTrainingEngine):
    """Every label of a position gets the log-probability of the first."""

    def _outputs(self, micro: toolkit.MicroBatch, top_k: int = 0) -> toolkit.ModelOutputs:
        labels = micro.targets.view(len(micro.tokens), -1)
        first = labels.masked_fill(labels != toolkit.IGNORED, 0) + labels.clamp(min=0).amax(1, keepdim=True)
        return super()._outputs(replace(micro, targets=first.clamp(max=60).view(micro.targets.shape)), top_k)


@caught_by("outputs_beside_a_gradient_are_those_of_forward", "sequences once over all ranks", ranks=2)
class CountsByRank(TemplateTrainingEngine):
    """Outputs beside a gradient come under their number in the rank's share."""

    def forward_backward(self, *arguments: Any, **named: Any) -> toolkit.BackwardResult:
        result = super().forward_backward(*arguments, **named)
        return replace(result, outputs=dict(enumerate(result.outputs.values())))


@caught_by("the_gradient_of_a_mini_batch_is_that_of_one_process[one call]", "it is 0.5 off", ranks=2)
class AveragesOverRanks(TemplateTrainingEngine):
    """Gradients are averaged over the ranks, as DistributedDataParallel does by default."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        for parameter in self._trained.values():
            parameter.grad /= self.world
        return super().optim_step(before_change)


@caught_by(
    "the_gradient_does_not_depend_on_the_split_into_calls_and_micro_batches[qwen3]", "the gradient within .* off"
)
class ForgetsEarlierCalls(TemplateTrainingEngine):
    """Each call begins with gradients of 0."""

    def forward_backward(self, *arguments: Any, **named: Any) -> toolkit.BackwardResult:
        for parameter in self._trained.values():
            parameter.grad.zero_()
        return super().forward_backward(*arguments, **named)


@caught_by("a_rank_without_a_sequence_takes_part", "as loss of all calls, it is nan", ranks=2)
class IsNoNumberWithoutTargets(TemplateTrainingEngine):
    """A mean over no targets."""

    def _outputs(self, micro: toolkit.MicroBatch, top_k: int = 0) -> toolkit.ModelOutputs:
        found = super()._outputs(micro, top_k)
        count = micro.mask.sum()
        return replace(found, logprobs=found.required("logprobs") * count / count)


@caught_by("half_precision_is_for_computing_only", "float32 weights of .* bit for bit")
class RoundsItsWeights(TemplateTrainingEngine):
    """Master weights are as narrow as the computation."""

    def setup(self, model_dir: Path, seed: int) -> None:
        super().setup(model_dir, seed)
        for parameter in self._trained.values():
            parameter.data.copy_(parameter.data.to(self._compute_dtype))


@caught_by("what_the_model_does_not_have_is_refused_and_leaves_no_gradient[token]", "ProtocolError from .* it returned")
class TakesAnyToken(TemplateTrainingEngine):
    """A token that the model does not have counts as its last one."""

    def forward_backward(self, batch: toolkit.TokenBatch, *arguments: Any, **named: Any) -> toolkit.BackwardResult:
        known = (replace(s, tokens=s.tokens.clamp(max=60), targets=s.targets.clamp(max=60)) for s in batch.sequences)
        return super().forward_backward(toolkit.TokenBatch(tuple(known)), *arguments, **named)


@caught_by("a_mini_batch_is_fixed_until_the_step", "ProtocolError from .* it returned")
class TakesAnyMiniBatch(TemplateTrainingEngine):
    """The latest one is used."""

    def _same_denominators(
        self,
        begun: toolkit.LossDenominators | None,
        batch: toolkit.TokenBatch,
        denominators: toolkit.LossDenominators | None,
    ) -> toolkit.LossDenominators:
        return denominators or toolkit.LossDenominators.of(batch)


@caught_by("a_mini_batch_is_fixed_until_the_step", "ProtocolError from .* it returned")
class AddsEqualMiniBatches(TemplateTrainingEngine):
    """A batch that is a mini-batch of its own is taken for a part of one with the same counts."""

    def _same_denominators(self, begun: Any, batch: toolkit.TokenBatch, denominators: Any) -> toolkit.LossDenominators:
        return super()._same_denominators(begun, batch, denominators or toolkit.LossDenominators.of(batch))


@caught_by("steps_are_those_of_adamw", "the norm before clipping, .* of step 1")
class AddsDecayToTheGradient(TemplateTrainingEngine):
    """Adam with L2 regularisation in the place of AdamW."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        def decay(names: Collection[str]) -> None:
            before_change(names)
            for each in self._trained.values():
                each.grad += self.config.weight_decay * each.detach()

        settings = toolkit.AdamParams.of(self.config, self._step)
        return super().optim_step(decay, params=replace(settings, weight_decay=0.0))


@caught_by("the_fence_is_told_of_each_tensor_once_before_it_changes", "no change before the fence")
class AsksTheFenceAfterwards(TemplateTrainingEngine):
    """The weights have changed when the fence is told."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        told: list[Collection[str]] = []
        norm = super().optim_step(told.append)
        for names in told:
            before_change(names)
        return norm


@caught_by("a_step_whose_fence_fails_changes_nothing", "nothing to change on rank 0, it changed")
class StepsInAnyCase(TemplateTrainingEngine):
    """An error of the fence is raised when the step is done."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        errors: list[WeightlaneError] = []

        def guarded(names: Collection[str]) -> None:
            try:
                before_change(names)
            except WeightlaneError as error:
                errors.append(error)

        norm = super().optim_step(guarded)
        for error in errors:
            raise error
        return norm


@caught_by("a_step_that_stops_half_way_leaves_an_engine_that_only_loads", "WeightlaneError from .* it returned")
class TrainsOnAfterHalfAStep(TemplateTrainingEngine):
    """It steps in two parts, and forgets that it took one of them only."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        first = len(self._runs) // 2

        def in_parts(names: Collection[str]) -> None:
            listed = list(names)
            before_change(listed[:first])
            next(iter(self._trained.values())).data.add_(1.0)
            before_change(listed[first:])

        return super().optim_step(in_parts)


@caught_by("a_gradient_that_is_not_finite_changes_nothing", "GradientError from rank 0, it raised nothing")
class StepsByWhateverThereIs(TemplateTrainingEngine):
    """Nobody looks at the gradient norm."""

    def _refuse_not_finite(self, norm: float, step: int, clear: Callable[[], None]) -> None:
        pass


@caught_by("a_step_without_a_gradient_is_refused", "ProtocolError from rank 0, it raised noth")
class StepsWithoutAGradient(TemplateTrainingEngine):
    """A step whose gradient is zeros still moves weights, by their decay."""

    def _require_gradient(self, begun: toolkit.LossDenominators | None, step: int) -> None:
        pass


@caught_by("shards_are_the_checkpoint_bit_for_bit[qwen3]", "rank 0 also publishes lm_head.weight")
class PublishesTiedTensorsTwice(TemplateTrainingEngine):
    """The head is published beside the embedding, which it is."""

    def local_shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        shards = super().local_shards(wire_dtype)
        embedding = next(shard for shard in shards if "embed_tokens" in shard.spec.name)
        spec = TensorSpec("lm_head.weight", embedding.spec.shape, embedding.spec.dtype)
        return [*shards, LocalShard.whole(spec, embedding.data)]


@caught_by("shards_never_move", "they moved in load")
class MovesOnLoading(TemplateTrainingEngine):
    """Loaded weights are new tensors."""

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        super().load(directory, optimizer=optimizer)
        for parameter in self._trained.values():
            parameter.data = parameter.data.clone()
        self._tensors = toolkit.checkpoint_tensors(self._model)


@caught_by("placements_are_known_before_ranks_run[qwen3]", "the placement of rank 1", ranks=2)
class OutlinesForOneRank(TemplateTrainingEngine):
    """The outline of every rank but the first has no tensor."""

    def outline(self, model_dir: Path) -> None:
        self._model = toolkit.whole_model(model_dir)
        self._tensors = toolkit.checkpoint_tensors(self._model)
        self._runs = toolkit.checkpoint_runs(self._model, self._tensors) if self.rank == 0 else []
        self._kept = toolkit.kept_types(model_dir, (run.name for run in self._runs))


@caught_by("a_saved_run_continues_bit_for_bit", "the gradient norms .* in the same engine")
class KeepsItsMoments(TemplateTrainingEngine):
    """A state is loaded without the optimizer's part of it."""

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        moments = {name: {key: value.clone() for key, value in each.items()} for name, each in self._moments()}
        super().load(directory, optimizer=optimizer)
        for name, state in self._moments():
            for key, value in state.items():
                value.copy_(moments[name][key])

    def _moments(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        return list(self._optimizer_state().items())


@caught_by("training_begins_anew_with_weights", "step 0 with the weights in state")
class ResumesWhatIsToBeginAnew(TemplateTrainingEngine):
    """The optimizer's part of a state is loaded whether it is wanted or not."""

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        del optimizer
        super().load(directory)


@caught_by("a_step_may_have_settings_of_its_own", "two steps with settings of their own .* off")
class StepsAsConfigured(TemplateTrainingEngine):
    """Settings that come with a step do not count."""

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: Any = None) -> float:
        return super().optim_step(before_change)


@caught_by("another_number_of_ranks_continues_a_saved_run", "two steps of 2 ranks and one of 1 within .* off", ranks=2)
class ForgetsMomentsOfOtherRanks(TemplateTrainingEngine):
    """Moments of a state that another number of ranks saved are 0."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        if self.rank == 0:
            (directory / "ranks.txt").write_text(str(self.world))
        dist.barrier()

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        super().load(directory, optimizer=optimizer)
        if int((directory / "ranks.txt").read_text()) != self.world:
            for state in self._optimizer_state().values():
                state["exp_avg"].zero_()


@caught_by("a_directory_that_exists_or_a_full_disk_fails_on_every_rank_and_leaves_nothing", "not to touch")
class WritesIntoWhatIsThere(TemplateTrainingEngine):
    """A directory that exists gets a file more."""

    def save(self, directory: Path) -> None:
        if self.rank == 0 and directory.is_dir():
            (directory / "lock").touch()
        super().save(directory)


@caught_by("a_directory_without_a_state_is_not_loaded", "WeightlaneError from load of rank 0, it returned")
class LoadsNothing(TemplateTrainingEngine):
    """A directory without a state is as good as the state that there is."""

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        if directory.is_dir():
            super().load(directory, optimizer=optimizer)


@caught_by("a_state_of_another_model_is_not_loaded", "ConfigError from load of rank 0, it returned")
class OverlooksMisfits(TemplateTrainingEngine):
    """A state that does not fit changes nothing, and nobody hears of it."""

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        with contextlib.suppress(ConfigError):
            super().load(directory, optimizer=optimizer)


@caught_by("an_exported_model_loads_in_transformers[qwen3]", "trained weights, exported as bfloat16, bit for bit")
class ExportsWhatItHas(TemplateTrainingEngine):
    """Exports are float32 whatever is asked for."""

    def export_hf(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        super().export_hf(directory, torch.float32)


@caught_by("state_that_is_away_comes_back_bit_for_bit", "the same step after state was away")
class ForgetsGradientsThatAreAway(TemplateTrainingEngine):
    """Gradients come back as zeros."""

    def onload(self, parts: Collection[toolkit.StatePart] = toolkit.STATE_PARTS) -> None:
        away = self.offloaded
        super().onload(parts)
        if "gradients" in away and "gradients" in parts:
            for parameter in self._trained.values():
                parameter.grad.zero_()


@caught_by(
    "a_killed_rank_is_reported_long_before_the_timeout", "WeightlaneError from .* it raised RuntimeError", ranks=2
)
class RaisesWhatTorchRaises(TemplateTrainingEngine):
    """Errors of torch.distributed come out as they are."""

    def _collective(self, waiting_for: str) -> AbstractContextManager[None]:
        return nullcontext()


@caught_by("a_rank_that_never_comes_is_waited_for_until_the_timeout", "hung", ranks=2)
class WaitsForeverForRanks(TemplateTrainingEngine):
    """The timeout is for collectives, and not for joining."""

    def _join(self, model_dir: Path, seed: int) -> None:
        time.sleep(self.config.collective_timeout_s + 3600)
        super()._join(model_dir, seed)


@caught_by("close_may_be_called_at_any_time_and_twice", "closed already")
class RaisesOnTheSecondClose(TemplateTrainingEngine):
    """An engine that is gone cannot be closed."""

    _closed = False

    def close(self) -> None:
        super().close()
        if self._closed:
            raise RuntimeError("closed already")
        self._closed = True


@caught_by("a_closed_engine_leaves_nothing_behind", r"rank 0 has \d+ threads instead of")
class LeavesAThread(TemplateTrainingEngine):
    """One for each engine, which nobody ends."""

    def setup(self, model_dir: Path, seed: int) -> None:
        super().setup(model_dir, seed)
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
