"""A training engine: the complete transformers model on every rank, gradients summed over the ranks, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightlane.sync import LocalShard
from weightlane.trainer import engine_toolkit as toolkit


class TemplateTrainingEngine(toolkit.TorchEngine):
    """Data parallelism by hand. Each rank computes its share of the sequences; master weights are float32."""

    _model: Any = None

    def setup(self, model_dir: Path, seed: int) -> None:
        """See `TrainingEngine.setup`."""
        toolkit.check_model_dir(model_dir, self.config.head)
        self._join(model_dir, seed)
        model = toolkit.whole_model(model_dir, self.config.head).to(self._device)
        self._tensors = toolkit.checkpoint_tensors(model)
        self._runs = toolkit.checkpoint_runs(model, self._tensors)
        self._kept = toolkit.kept_types(model_dir, (run.name for run in self._runs))
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._optimizer = toolkit.AdamW("adamw", [{"params": list(self._trained.values())}])
        self._model = model
        self._vocabulary = self._model.config.vocab_size
        self._clear_gradients()

    def forward(
        self,
        batch: toolkit.TokenBatch,
        outputs: Collection[toolkit.OutputName] = toolkit.LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> dict[int, toolkit.SequenceOutputs]:
        """See `TrainingEngine.forward`."""
        self._open(adapter).eval()
        self._check_outputs(outputs, top_k)
        self._require_here("parameters")
        names = (*outputs, *(toolkit.TOP if top_k else ()))
        found: dict[int, toolkit.SequenceOutputs] = {}
        with torch.no_grad():
            for indices, micro in self._share(batch, self.rank, self.world, padded=True):
                found |= toolkit.outputs_by_sequence(indices, micro, self._outputs(micro, top_k), names)
        return found

    def forward_backward(
        self,
        batch: toolkit.TokenBatch,
        loss: toolkit.Loss,
        denominators: toolkit.LossDenominators | None = None,
        outputs: Collection[toolkit.OutputName] = (),
        adapter: str | None = None,
    ) -> toolkit.BackwardResult:
        """See `TrainingEngine.forward_backward`."""
        self._open(adapter).train(self._dropout)
        self._check_outputs({*outputs, *toolkit.needed_outputs(loss)})
        self._require_here("parameters", "gradients")
        self._denominators = self._same_denominators(self._denominators, batch, denominators)
        sums = toolkit.LossSums(self._denominators)
        found: dict[int, toolkit.SequenceOutputs] = {}
        try:
            with self._collective("the losses of the other ranks"):
                for indices, micro in self._share(batch, self.rank, self.world, padded=True):
                    computed = self._outputs(micro)
                    torch.autograd.backward(sums.add(loss(computed, micro)))
                    found |= toolkit.outputs_by_sequence(indices, micro, computed, outputs)
                totals = sums.as_tensor()
                dist.all_reduce(totals)
        except BaseException:
            self._clear_gradients()  # of the complete mini-batch, including earlier calls
            raise
        return toolkit.BackwardResult(sums.named(totals, batch.target_tokens), found)

    def optim_step(
        self,
        before_change: Callable[[Collection[str]], None],
        adapter: str | None = None,
        params: toolkit.AdamParams | None = None,
    ) -> float:
        """See `TrainingEngine.optim_step`. All parameters are stepped at once."""
        self._open(adapter)
        self._require_here(*toolkit.STATE_PARTS)
        self._require_gradient(self._denominators, self._step)
        parameters = self._trained.values()
        params = params or toolkit.AdamParams.of(self.config, self._step)
        with self._collective("the gradients of the other ranks"):
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
            norm = float(torch.nn.utils.clip_grad_norm_(parameters, params.max_grad_norm))
        self._refuse_not_finite(norm, self._step, self._clear_gradients)
        try:
            before_change([run.name for run in self._runs if run.source in self._trained])
        except BaseException:
            self._clear_gradients()  # they are already summed over the ranks, so nothing may be accumulated into them
            raise
        params.set_in(self._optimizer)
        self._optimizer.step()
        self._clear_gradients()
        self._step += 1
        return norm

    def local_shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        """See `TrainingEngine.local_shards`. Every rank has all tensors."""
        self._open()
        return toolkit.local_shards(self._runs, self._tensors, 0, wire_dtype, self._kept)

    def save(self, directory: Path) -> None:
        """See `TrainingEngine.save`."""
        self._open()
        self._require_here("parameters", "optimizer")
        with self._collective("the trainer ranks to save"):
            toolkit.save_state(directory, self._trained_slices(), self._step, self.rank, self._device)

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """See `TrainingEngine.load`."""
        toolkit.require_open(self._model is not None, self._part)
        self._require_here("parameters", "optimizer")
        with self._collective("the trainer ranks to load"), self._torn_unless_refused():
            model = self.config.head, {run.name: run.shape for run in self._runs}, self._trained_slices()
            self._step = toolkit.resume(directory, *model, self.rank, self._device, optimizer=optimizer)
        self._clear_gradients()

    def export_hf(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """See `TrainingEngine.export_hf`."""
        self._open()
        self._require_here("parameters")
        shards, timeout_s = self.local_shards(dtype), self.config.collective_timeout_s
        about = toolkit.ExportedModel(self._model_dir, self.config.head, dtype)
        with self._collective("the trainer ranks to export the model"):
            toolkit.export_model(directory, about, shards, self.rank, self._device, timeout_s)

    def close(self) -> None:
        """See `TrainingEngine.close`."""
        self._model, self._tensors, self._trained = None, {}, {}
        self._leave()

    def _open(self, adapter: str | None = None) -> Any:
        if adapter:
            raise self.without_adapters(adapter)
        toolkit.require_open(self._model is not None, self._part)
        self._refuse_torn()
        return self._model

    def _outputs(self, micro: toolkit.MicroBatch, top_k: int = 0) -> toolkit.ModelOutputs:
        """Return all outputs of a micro-batch, from logits over the full vocabulary."""
        tokens, places = micro.padded()  # on the right, where causal attention does not see it
        half = self._compute_dtype != torch.float32
        with torch.autocast(self._device.type, self._compute_dtype, enabled=half):
            found = self._model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        hidden = found.hidden_states[-1].flatten(0, 1)[places]
        logits = found.logits.flatten(0, 1)[places].float()
        if self.config.head == "value":
            return toolkit.ModelOutputs(values=torch.where(micro.mask, logits[:, 0], 0.0), hidden=hidden)
        if micro.temperatures is not None:
            logits = logits / micro.temperatures[:, None]
        logs = torch.log_softmax(logits, -1)
        labels = micro.targets.view(len(places), -1)
        chosen = torch.where(labels != toolkit.IGNORED, logs.gather(1, labels.clamp(min=0)), 0.0)
        entropy = torch.where(micro.mask, -(logs.exp() * logs).sum(1), 0.0)
        best = logs.detach().topk(top_k)
        return toolkit.ModelOutputs(
            chosen.view(micro.targets.shape),
            entropy,
            hidden=hidden,
            top_tokens=torch.where(micro.mask[:, None], best.indices, 0),
            top_logprobs=torch.where(micro.mask[:, None], best.values, 0.0),
        )

    def _trained_slices(self) -> list[toolkit.TrainedSlice]:
        return toolkit.trained_slices(self._runs, self._tensors, self._optimizer_state())

    def _optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: self._optimizer.state[parameter] for name, parameter in self._trained.items()}

    def _memory_of(self, part: toolkit.StatePart) -> Iterable[torch.Tensor]:
        self._open()
        if part == "parameters":
            return self._tensors.values()
        if part == "gradients":
            return [each.grad for each in self._trained.values() if each.grad is not None]
        return [tensor for state in self._optimizer_state().values() for tensor in state.values()]

    def _clear_gradients(self) -> None:
        self.onload(["gradients"])
        self._denominators = None
        for parameter in self._trained.values():  # zeros, not None: every rank all-reduces every gradient
            parameter.grad = torch.zeros_like(parameter)
