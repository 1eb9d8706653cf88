"""The built-in training engine: PyTorch FSDP2 over any Hugging Face causal language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.tensor_spec import LocalShard

from ...config import TrainerConfig
from ...data.batch import MicroBatch, TrainBatch
from ...objectives.losses import LossFn, token_logprobs
from ..hf.model_dir import check_model_dir, kept_types
from ..hf.names import CheckpointRun, checkpoint_runs
from ..rank_collectives import require_open
from ..torch_engine import TorchEngine, add_sums, means
from .mesh import RankMesh, check_mesh, clip_gradients
from .partwise_adamw import PartwiseAdamW, split_into_parts
from .shards import checkpoint_tensors, local_shards
from .state import export_model, export_saved, load_state, save_state


class Fsdp2Engine(TorchEngine):
    """Shards every decoder layer, and the rest of the model, over all ranks with ``fully_shard``.

    Where neighbouring ranks share every matrix (``TrainerConfig.fsdp2``), it does so over those that hold the same part. Master
    weights, gradients and AdamW's moments are float32 ``DTensor``s; forward and backward run in
    ``TrainerConfig.compute_dtype``. The model is in evaluation mode, since a dropout that the rollout does not have would only
    add noise to the importance weights.
    """

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._model: torch.nn.Module | None = None

    @classmethod
    def check(cls, config: TrainerConfig, model_dir: Path) -> None:
        """See `TrainingEngine.check`."""
        check_mesh(config, model_dir)

    def setup(self, model_dir: Path, seed: int) -> None:
        """See `TrainingEngine.setup`."""
        check_model_dir(model_dir)
        check_mesh(self.config, model_dir)
        self._join(model_dir, seed)
        model = _load_model(model_dir)
        self._shard(model, model_dir)
        takes = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in takes
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(trained.values())
        self._optimizer = PartwiseAdamW(
            split_into_parts(trained, self._runs),
            learning_rate=self.config.learning_rate,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
        )

    def outline(self, model_dir: Path) -> None:
        """See `TrainingEngine.outline`."""
        check_mesh(self.config, model_dir)
        self._shard(_model_without_weights(model_dir), model_dir)

    def forward_backward(self, batch: TrainBatch, loss: LossFn) -> dict[str, float]:
        """See `TrainingEngine.forward_backward`."""
        model = self._open_model()
        mesh, tokens = self._mesh, batch.loss_tokens
        sums: dict[str, torch.Tensor] = {}
        with self._collective("the gradients of the other ranks"):
            for cpu_micro in batch.micro_batches(mesh.data_rank, mesh.data_world, self.config.micro_batch_tokens):
                micro = cpu_micro.to(self._device)
                output = loss(self._logprobs(model, micro, batch.temperature), micro)
                # FSDP averages gradients over the ranks; the token mean wants their sum.
                torch.autograd.backward(output.loss_sum * (mesh.data_world / tokens))
                add_sums(sums, output)
            totals = torch.stack([value.double() for value in sums.values()])
            dist.all_reduce(totals, group=mesh.data.get_group())
        return means(sums, totals, batch)

    def optim_step(self, before_change: Callable[[Collection[str]], None]) -> float:
        """See `TrainingEngine.optim_step`."""
        self._open_model()
        with self._collective("the gradient norm of the other ranks"):
            self._mesh.complete_gradients(self._loaded_model())
            norm_value = clip_gradients(self._parameters, self.config.max_grad_norm)
        self._refuse_not_finite(norm_value)
        self._optimizer.set_learning_rate(self._learning_rate())

        def about_to_change(names: Collection[str]) -> None:
            before_change(names)
            self._torn = True

        self._optimizer.step(about_to_change)
        self._torn = False
        self._clear_gradients()
        self._step += 1
        return norm_value

    def local_shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        """See `TrainingEngine.local_shards`."""
        return local_shards(self._runs, checkpoint_tensors(self._open_model()), self.rank, wire_dtype, self._kept)

    def save(self, directory: Path) -> None:
        """See `TrainingEngine.save`."""
        tensors = checkpoint_tensors(self._open_model())
        with self._collective("the trainer ranks to save"):
            save_state(directory, tensors, self._named_optimizer_state(), self._step, self.rank, self._device)

    def load(self, directory: Path) -> None:
        """See `TrainingEngine.load`."""
        tensors = checkpoint_tensors(self._loaded_model())
        with self._collective("the trainer ranks to load"):
            self._step = load_state(directory, tensors, self._named_optimizer_state(), self.rank, self._device)
        self._torn = False

    def export_hf(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """See `TrainingEngine.export_hf`."""
        tensors = checkpoint_tensors(self._open_model())
        with self._collective("the trainer ranks to export the model"):
            kept = _sources(self._runs, self._kept)
            export_model(directory, self._model_dir, tensors, dtype, kept, self.rank, self._device)

    @classmethod
    def export_saved(cls, state: Path, model_dir: Path, directory: Path, dtype: torch.dtype) -> None:
        """See `TrainingEngine.export_saved`; reads the weights only."""
        model = _model_without_weights(model_dir)
        runs = checkpoint_runs(model, checkpoint_tensors(model))
        kept = kept_types(model_dir, (run.name for run in runs))
        export_saved(state, model_dir, directory, dtype, _sources(runs, kept))

    def close(self) -> None:
        """See `TrainingEngine.close`."""
        self._model = None
        self._parameters = []
        self._optimizer = None  # type: ignore[assignment]  # nothing uses it once the model is gone
        self._leave()

    def _shard(self, model: torch.nn.Module, model_dir: Path) -> None:
        """Split `model` over the ranks, in place, and note what its parameters are saved as. Collective."""
        self._runs = checkpoint_runs(model, checkpoint_tensors(model))
        self._kept = kept_types(model_dir, (run.name for run in self._runs))
        with self._collective("the trainer ranks to shard the model"):
            self._mesh = RankMesh.of(
                self._device,
                self.rank,
                self.world,
                self.config.fsdp2.tensor_parallel,
                self.config.collective_timeout_s,
            )
            self._mesh.shard(model, _decoder_layers(model), self.config, self._compute_dtype)
        self._model = model

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _loaded_model(self) -> torch.nn.Module:
        require_open(self._model is not None, self._part)
        assert self._model is not None
        return self._model

    def _open_model(self) -> torch.nn.Module:
        self._refuse_torn()
        return self._loaded_model()

    def _logprobs(self, model: torch.nn.Module, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """float32 [B, A]: log-probability of each target."""
        wanted = micro.input_ids.shape[1] - micro.first_target + 1
        extra: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_logits else {}
        output = model(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False, **extra)
        # The logits of a position predict the next one, so the last position's predict nothing.
        return token_logprobs(output.logits[:, -wanted:-1], micro.targets, temperature)

    def _named_optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            name: self._optimizer.state_of(parameter)
            for name, parameter in self._loaded_model().named_parameters()
            if parameter.requires_grad
        }


def _sources(runs: Sequence[CheckpointRun], kept: Collection[str]) -> set[str]:
    """The parameters and buffers that are saved as the checkpoint tensors `kept`."""
    return {run.source for run in runs if run.name in kept}


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks transformers says must not be split, or else the members of the longest module list."""
    kept_whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    layers = [layer for blocks in lists for layer in blocks if type(layer).__name__ in kept_whole]
    return layers or max((list(blocks) for blocks in lists), key=len, default=[])


def _load_model(model_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional, and slow to import
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as above

    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be loaded: {cause}", part="model", hint="Check or fetch it again."
        ) from cause
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(item) for item in report.get(kind) or ()):
            raise ConfigError(
                f"the weights in {model_dir} do not fit their config.json: {kind.replace('_', ' ')} {', '.join(names[:5])}"
                f"{' and more' if len(names) > 5 else ''}.",  # noqa: PLR2004 - enough names to recognise the pattern
                part="model",
                hint="Fetch the model again, or repair its config.json.",
            )
    loaded: torch.nn.Module = model.eval()
    return loaded


def _model_without_weights(model_dir: Path) -> torch.nn.Module:
    """The model that `_load_model` would load, on the meta device. Only ``config.json`` is read."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - as above

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(f"the model in {model_dir} cannot be built: {cause}", part="model") from cause
    return model.eval()
