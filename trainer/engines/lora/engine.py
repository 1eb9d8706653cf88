"""`AdaptedEngine`, the base of training engines with adapters: the part that does not depend on a parallel layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.tensor_spec import LocalShard

from ...config import Head, LoraConfig, TrainerConfig
from ...data.batch import LossDenominators, TokenBatch
from ...data.sequences import MicroBatch
from ...objectives.loss import LOGPROBS, Loss, LossSums, ModelOutputs, OutputName, needed_outputs
from ..contract import STATE_PARTS, AdapterEngine, BackwardResult, Fence, ForwardBackward, SequenceOutputs
from ..hf.checkpoint import checkpoint_runs, checkpoint_tensors, model_without_weights
from ..hf.export import ExportedModel, export_model
from ..hf.partial_dir import PART as STATE_PART
from ..hf.partial_dir import write_together
from ..hf.training_state import export_saved
from ..optimizers.settings import AdamParams
from ..rank_collectives import on_every_rank, require_open
from ..torch_engine import TOP, TorchEngine, outputs_by_sequence
from .adapter import Adapter
from .adapters import AdaptedModel, Adapters
from .joint import StartedPass
from .peft_files import read_optimizer, write_peft
from .saved import SavedAdapters
from .sites import DEFAULT, PART

Keep = Callable[[list[int], MicroBatch, ModelOutputs], None]
"""Function that takes the indices of a micro-batch's sequences in their batch, the micro-batch, and its outputs."""


class AdaptedEngine(TorchEngine, AdapterEngine):
    """A `TorchEngine` with adapters. Subclasses call `_make_adapters` in `setup`, when the model has its weights."""

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._lora: Adapters | None = None

    @property
    def step(self) -> int:
        """See `TrainingEngine.step`."""
        return self._step if self._lora is None else self.steps_of(None)

    def steps_of(self, adapter: str | None = None) -> int:
        """See `AdapterEngine.steps_of`."""
        require_open(self._lora is not None, self._part)
        assert self._lora is not None
        chosen = self._lora.chosen(adapter)
        return self._step if chosen is None else chosen.step

    def forward(
        self,
        batch: TokenBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> dict[int, SequenceOutputs]:
        """See `TrainingEngine.forward`."""
        chosen = self._open_adapters().chosen(adapter)
        self._require_here("parameters")
        self._check_outputs(outputs, top_k)
        names = (*outputs, *(TOP if top_k else ()))
        found: dict[int, SequenceOutputs] = {}

        def keep(indices: list[int], micro: MicroBatch, computed: ModelOutputs) -> None:
            found.update(outputs_by_sequence(indices, micro, computed, names))

        with (
            self._computing("the other ranks in a forward pass"),
            self._open_adapters().active_runs([(chosen, 0)]),
            torch.no_grad(),
        ):
            self._run_forward(batch, outputs, top_k, keep)
        return found if self._answers else {}

    def forward_backward(
        self,
        batch: TokenBatch,
        loss: Loss,
        denominators: LossDenominators | None = None,
        outputs: Collection[OutputName] = (),
        adapter: str | None = None,
    ) -> BackwardResult:
        """See `TrainingEngine.forward_backward`."""
        return self._run_passes([self._started(ForwardBackward(batch, loss, denominators, outputs, adapter))])[0]

    def optim_step(self, before_change: Fence, adapter: str | None = None, params: AdamParams | None = None) -> float:
        """See `TrainingEngine.optim_step`. An adapter is stepped in one part: `before_change` is called at most once."""
        chosen = self._trained(adapter)
        self._require_here(*STATE_PARTS)
        if chosen is not None:
            self._require_gradient(chosen.denominators, chosen.step)
            norms = self._completed([chosen], 1.0)
            self._change([chosen], norms, before_change, params)
            return norms[chosen.name]
        self._require_gradient(self._denominators, self._step)
        norm = self._step_weights(before_change, params or AdamParams.of(self.config, self._step))
        self._clear_gradients()
        self._step += 1
        return norm

    def local_shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        """See `TrainingEngine.local_shards`."""
        if self.config.publishes_adapter:
            return self._open_adapters().shards(wire_dtype)
        own = self._weight_shards(wire_dtype)
        if self._lora is None or self.config.lora is None:
            return own
        self._require_here("parameters")
        return self._lora.merged(own)

    def save(self, directory: Path, *, adapters: bool = True) -> None:
        """See `TrainingEngine.save`; without `adapters`, a state of the model's own weights and their optimizer only."""
        held = self._open_adapters()
        self._require_here("parameters", "optimizer")
        with self._collective("the trainer ranks to save"):
            self._save_weights(directory, (held.to_save() if adapters else SavedAdapters()).write)

    def load(self, directory: Path, *, optimizer: bool = True, adapters: bool = True) -> None:
        """See `TrainingEngine.load`; without `adapters`, these stay as they are."""
        require_open(self._lora is not None, self._part)
        self._require_here("parameters", "optimizer")
        if not adapters:
            self.onload(["gradients"])  # as in zero_grad
        with self._computing("the trainer ranks to load"), self._torn_unless_refused():
            saved = self._saved_adapters(directory) if adapters else None
            self._step = self._load_weights(directory, optimizer=optimizer)
            self._clear_gradients()
        if saved is not None:
            self._open_adapters().restore(saved, optimizer=optimizer)

    def export_hf(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """See `TrainingEngine.export_hf`."""
        adapters = self._open_adapters()
        about = ExportedModel(self._model_dir, self.config.head, dtype)
        self._require_here("parameters")
        shards, timeout_s = self._weight_shards(dtype), self.config.collective_timeout_s
        with self._collective("the trainer ranks to export the model"):
            export_model(directory, about, shards, self.rank, self._device, timeout_s, adapters.exported)

    @classmethod
    def export_saved(
        cls, state: Path, model_dir: Path, directory: Path, dtype: torch.dtype, head: Head = "tokens"
    ) -> None:
        """See `TrainingEngine.export_saved`; reads the weights only."""
        model = model_without_weights(model_dir, head)
        tensors = checkpoint_tensors(model)
        runs = checkpoint_runs(model, tensors)
        adapters = SavedAdapters.read(state)
        adapters.refuse_layers_beyond(
            {n.removesuffix(".weight") for run in runs for n in (run.name, run.source)}, state
        )
        export_saved(state, ExportedModel(model_dir, head, dtype), runs, tensors, adapters.merged, directory)

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `AdapterEngine.adapters`."""
        return self._open_adapters().names

    def add_adapter(
        self,
        name: str,
        config: LoraConfig,
        source: Path | None = None,
        *,
        replace: bool = False,
        resume: bool = False,
        trained: bool = True,
    ) -> None:
        """See `AdapterEngine.add_adapter`."""
        adapters, made = self._open_adapters(), []

        def make() -> None:
            made.append(adapters.make(name, config, source, trained=trained, replace=replace))
            if resume and trained and source is not None:
                made[0].resume(read_optimizer(source), source)

        with self._collective("the trainer ranks to make an adapter"):
            on_every_rank(make, self._device, PART)
        adapters.keep(made[0])

    def remove_adapter(self, name: str) -> None:
        """See `AdapterEngine.remove_adapter`."""
        self._open_adapters().remove(name)

    def export_adapter(self, directory: Path, name: str = DEFAULT, *, with_optimizer: bool = False) -> None:
        """See `AdapterEngine.export_adapter`."""
        adapters = self._open_adapters()
        self._require_here("parameters", "optimizer")
        adapter = adapters.chosen(name)
        if adapter is None:
            raise ConfigError("the model's own weights are no adapter.", part=PART, hint="Call export_hf for them.")
        with self._collective("the trainer ranks to export an adapter"):
            tensors, targets = adapters.gathered(name), {pair.site.target for pair in adapter.pairs.values()}

            def write(partial: Path) -> None:
                step = adapter.step if with_optimizer and adapter.trained else None
                write_peft(partial, tensors, adapter.config, targets, self._model_dir, step)

            write_together(directory, lambda _: None, write, self.rank, self._device)

    def load_published(self, before_change: Fence, adapter: str) -> None:
        """See `AdapterEngine.load_published`."""
        adapters = self._open_adapters()
        self._require_here("parameters")
        adapters.load_published(adapter, before_change)

    def zero_grad(self, *adapters: str) -> None:
        """See `TrainingEngine.zero_grad`."""
        if "" in adapters:
            self.onload(["gradients"])  # adapters' gradients are offloaded together with the model's, and must survive
        super().zero_grad(*adapters)
        for name in adapters or self.adapters:
            if (adapter := self._open_adapters().chosen(name)) is not None:
                adapter.clear_gradients()

    @property
    @abstractmethod
    def data_share(self) -> tuple[int, int]:
        """This rank's share of the samples, and the number of shares. Ranks of one share hold parts of one model."""

    @property
    @abstractmethod
    def _answers(self) -> bool:
        """Whether this rank returns the outputs of its share; of the ranks of one share, one does."""

    @abstractmethod
    def _run_forward(self, batch: TokenBatch, outputs: Collection[OutputName], top_k: int, keep: Keep) -> None:
        """Run the model on this rank's share of `batch`, and call `keep` for every micro-batch where outputs are computed."""

    @abstractmethod
    def _run_passes(self, passes: Sequence[StartedPass]) -> list[BackwardResult]:
        """Run the model forward and backward for `passes`: one, unless the engine joins those of equal `StartedPass.shape`."""

    @abstractmethod
    def _step_weights(self, before_change: Fence, params: AdamParams) -> float:
        """Step the model's own weights; returns the gradient norm. See `TrainingEngine.optim_step`."""

    @abstractmethod
    def _weight_shards(self, dtype: torch.dtype) -> list[LocalShard]:
        """List this rank's slices of the model's own weights. See `TrainingEngine.local_shards`."""

    @abstractmethod
    def _save_weights(self, directory: Path, write_beside: Callable[[Path], None]) -> None:
        """Save everything but adapters. `write_beside` writes these into the directory, on rank 0, before it gets its name."""

    @abstractmethod
    def _load_weights(self, directory: Path, *, optimizer: bool) -> int:
        """Load everything but adapters; returns the step. See `TrainingEngine.load`."""

    def _computing(self, waiting_for: str) -> AbstractContextManager[None]:
        """Wrap every computation with the model."""
        return self._collective(waiting_for)

    def _make_adapters(self, model: AdaptedModel, device: torch.device | None = None) -> None:
        """Prepare `model` for adapters, and make the one of ``trainer.lora``, by default on the model's device."""
        self._lora = Adapters(self.config, model, self.rank, device or self._device)

    def _open_adapters(self) -> Adapters:
        require_open(self._lora is not None, self._part)
        self._refuse_torn()
        assert self._lora is not None
        return self._lora

    def _trained(self, name: str | None) -> Adapter | None:
        """Return the adapter `name`, or None for the model's own weights. Raises `ConfigError` if it is not trained."""
        adapter = self._open_adapters().chosen(name)
        if adapter is None and not self.config.trains_weights:
            by, hint = "frozen is true", "Leave trainer.frozen out for a model that is trained."
            if self.config.lora is not None:
                by, hint = "lora is set", f"Train the adapter {DEFAULT!r}, or leave out trainer.lora."
            raise ConfigError(f"the model's own weights are frozen, since trainer.{by}.", part=self._part, hint=hint)
        if adapter is not None and not adapter.trained:
            raise ConfigError(
                f"adapter {adapter.name!r} only computes: it was added without an optimizer.",
                part=self._part,
                hint="Add one that is trained; that of trainer.lora is not where trainer.frozen is true.",
            )
        return adapter

    def _started(self, call: ForwardBackward) -> StartedPass:
        """Check `call`, and start its mini-batch, or continue the one it belongs to."""
        adapter = self._trained(call.adapter)
        self._require_here("parameters", "gradients")
        self._check_outputs({*call.outputs, *needed_outputs(call.function)})
        # Adapters and the model's own weights have a mini-batch each.
        denominators = self._same_denominators(self._begun(adapter), call.batch, call.denominators)
        if adapter is None:
            self._denominators = denominators
        else:
            adapter.denominators = denominators
        with self._whole_gradients(adapter):
            call.batch.check_vocabulary(self._vocabulary)
        return StartedPass(call, adapter, LossSums(denominators))

    def _begun(self, adapter: Adapter | None) -> LossDenominators | None:
        """Return the denominators of the mini-batch of `adapter`, or of the model's own weights; None if none has begun."""
        return self._denominators if adapter is None else adapter.denominators

    def _result(self, run: StartedPass, computed: int, outputs: Mapping[int, SequenceOutputs]) -> BackwardResult:
        """Sum the losses of a pass over the ranks; it has `computed` tokens and has these `outputs` on this rank. Collective."""
        total = torch.nn.functional.pad(run.sums.as_tensor(), (0, 1), value=computed)
        if not self._answers:
            total.zero_()  # ranks that share matrices or tokens have equal sums
        dist.all_reduce(total)
        batch = run.call.batch
        tokens = {"read_tokens": float(len(batch.packed.tokens)), "packed_tokens": float(total[-1])}
        named = run.sums.named(total[:-1], batch.target_tokens)
        return BackwardResult(named | tokens, outputs if self._answers else {})

    @contextmanager
    def _whole_gradients(self, *adapters: Adapter | None) -> Iterator[None]:
        """Wrap passes: if one fails, the gradients of these mini-batches are dropped completely."""
        try:
            yield
        except BaseException:
            for adapter in adapters:
                if adapter is not None:
                    adapter.clear_gradients()
                else:
                    self._clear_gradients()
            raise

    def _completed(self, chosen: Sequence[Adapter], scale: float) -> dict[str, float]:
        """Sum the gradients of adapters over the ranks and multiply them by `scale`; returns their norms. Collective.

        If a norm is not finite, the gradients of all of them are dropped, and `GradientError` names the adapter.
        """
        norms: dict[str, float] = {}

        def clear() -> None:
            for adapter in chosen:
                adapter.clear_gradients()

        with self._collective("the gradients of the other ranks"):
            for adapter in chosen:
                norms[adapter.name] = adapter.complete_gradients(scale)
        for adapter in chosen:
            self._refuse_not_finite(norms[adapter.name], adapter.step, clear, f" of {adapter.name!r}")
        return norms

    def _change(
        self,
        chosen: Sequence[Adapter],
        norms: Mapping[str, float],
        before_change: Fence,
        params: AdamParams | None,
    ) -> None:
        """Step adapters, whose gradients `_completed` made. See `TrainingEngine.optim_step`."""
        adapters = self._open_adapters()
        for adapter in chosen:
            published = adapters.published_names(adapter)

            def about_to_change(names: Collection[str] = tuple(published)) -> None:
                if names:
                    before_change(names)
                self._torn = True

            adapter.change(norms[adapter.name], about_to_change, params)
            with self._collective("the adapters of the other ranks"):
                adapters.complete_step(adapter)
            self._torn = False

    def _saved_adapters(self, directory: Path) -> SavedAdapters:
        """Read the adapters in a saved state, and check that they fit this engine's; empty if there are none. Collective."""
        assert self._lora is not None
        adapters, found = self._lora, [SavedAdapters()]

        def read() -> None:
            if directory.is_dir():
                found[0] = SavedAdapters.read(directory)
                adapters.check(found[0], directory)

        on_every_rank(read, self._device, STATE_PART)
        return found[0]
