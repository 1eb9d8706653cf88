"""`AdaptedEngine`, the base of training engines whose model can have adapters: everything about them that no layout changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig, TrainerConfig
from ...data.batch import MiniBatch, TokenBatch
from ..hf.partial_dir import PART as STATE_PART
from ..hf.partial_dir import write_on_rank_zero
from ..rank_collectives import on_every_rank, require_open
from ..torch_engine import TorchEngine
from .adapter import Adapter
from .adapters import DEFAULT, AdaptedModel, Adapters
from .peft_files import write_peft
from .saved import SavedAdapters
from .sites import PART


class AdaptedEngine(TorchEngine):
    """A `TorchEngine` with adapters. Subclasses call `_make_adapters` in `setup`, when the model has its weights."""

    has_adapters = True

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._lora: Adapters | None = None

    @property
    def step(self) -> int:
        """See `TrainingEngine.step`."""
        trained = self._lora.chosen(None) if self._lora is not None else None
        return self._step if trained is None else trained.step

    @property
    def adapters(self) -> tuple[str, ...]:
        """See `TrainingEngine.adapters`."""
        return self._open_adapters().names

    def add_adapter(self, name: str, config: LoraConfig, source: Path | None = None) -> None:
        """See `TrainingEngine.add_adapter`."""
        adapters, made = self._open_adapters(), []
        with self._collective("the trainer ranks to make an adapter"):
            on_every_rank(lambda: made.append(adapters.make(name, config, source)), self._device, PART)
        adapters.keep(made[0])

    def remove_adapter(self, name: str) -> None:
        """See `TrainingEngine.remove_adapter`."""
        self._open_adapters().remove(name)

    def export_adapter(self, directory: Path, name: str = DEFAULT) -> None:
        """See `TrainingEngine.export_adapter`."""
        adapters = self._open_adapters()
        self._require_here("parameters", "optimizer")
        adapter = adapters.chosen(name)
        if adapter is None:
            raise ConfigError("the model's own weights are no adapter.", part=PART, hint="Call export_hf for them.")
        with self._collective("the trainer ranks to export an adapter"):
            tensors, targets = adapters.gathered(name), adapters.targets(name)

            def write() -> None:
                write_peft(directory, tensors, adapter.config, targets, self._model_dir)

            write_on_rank_zero(write, directory, self.rank, self._device)

    def zero_grad(self) -> None:
        """See `TrainingEngine.zero_grad`."""
        super().zero_grad()
        for name in self.adapters:
            adapter = self._open_adapters().chosen(name)
            assert adapter is not None
            adapter.clear_gradients()

    def _make_adapters(self, model: AdaptedModel) -> None:
        """Let `model` have adapters, and make the one of ``trainer.lora``."""
        self._lora = Adapters(self.config, model, self.rank, self._device)

    def _open_adapters(self) -> Adapters:
        require_open(self._lora is not None, self._part)
        self._refuse_torn()
        assert self._lora is not None
        return self._lora

    def _trained(self, name: str | None) -> Adapter | None:
        """The adapter `name`, or None for the model's own weights; refuses these where they are frozen."""
        adapter = self._open_adapters().chosen(name)
        if adapter is None and not self.config.trains_weights:
            by, hint = "frozen is true", "Leave trainer.frozen out for a model that is trained."
            if self.config.lora is not None:
                by, hint = "lora is set", f"Train the adapter {DEFAULT!r}, or leave out trainer.lora."
            raise ConfigError(f"the model's own weights are frozen, since trainer.{by}.", part=self._part, hint=hint)
        return adapter

    def _begin_for(self, adapter: Adapter | None, batch: TokenBatch, mini_batch: MiniBatch | None) -> MiniBatch:
        """The mini-batch that `batch` is part of; each adapter has one of its own, and so have the model's own weights."""
        if adapter is None:
            self._mini_batch = self._same_mini_batch(self._mini_batch, batch, mini_batch)
            return self._mini_batch
        adapter.mini_batch = self._same_mini_batch(adapter.mini_batch, batch, mini_batch)
        return adapter.mini_batch

    @contextmanager
    def _computing_with(self, adapter: Adapter | None, *, gradients: bool) -> Iterator[None]:
        """Around forward and backward with an adapter: where they fail, no part of the mini-batch's gradient is left."""
        assert self._lora is not None
        with self._lora.active(adapter):
            try:
                yield
            except BaseException:
                if gradients and adapter is not None:
                    adapter.clear_gradients()
                elif gradients:
                    self._clear_gradients()
                raise

    def _step_adapter(self, adapter: Adapter, before_change: Callable[[Collection[str]], None]) -> float:
        """See `TrainingEngine.optim_step`. An adapter is stepped at once: `before_change` is called once at most."""
        adapters = self._open_adapters()
        self._require_gradient(adapter.mini_batch, adapter.step)
        with self._collective("the gradients of the other ranks"):
            norm = adapters.complete_gradients(adapter)
        self._refuse_not_finite(norm, adapter.step, adapter.clear_gradients)
        published = adapters.published_names(adapter)

        def about_to_change() -> None:
            if published:
                before_change(published)
            self._torn = True

        adapter.change(norm, about_to_change)
        if published:
            adapters.refresh()
        self._torn = False
        return norm

    def _saved_adapters(self, directory: Path) -> SavedAdapters:
        """The adapters in a saved state, which fit this engine's; an empty list where there is no state. Collective."""
        assert self._lora is not None
        adapters, found = self._lora, [SavedAdapters()]

        def read() -> None:
            if directory.is_dir():
                found[0] = SavedAdapters.read(directory)
                adapters.check(found[0], directory)

        on_every_rank(read, self._device, STATE_PART)
        return found[0]
