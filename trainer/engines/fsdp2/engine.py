"""The built-in training engine: PyTorch FSDP2 over any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.sync.version.tensor_spec import LocalShard

from ...config import OPTIMIZERS, TrainerConfig
from ...data.batch import TokenBatch
from ...data.sequences import MicroBatch
from ...objectives.loss import ModelOutputs, OutputName
from ..contract import BackwardResult, Fence, ForwardBackward, SequenceOutputs, StatePart
from ..head import PassQuery
from ..hf.checkpoint import CheckpointRun, checkpoint_tensors
from ..hf.context_split import split_layout
from ..hf.heads import read_values, replace_head
from ..hf.layout import Layout
from ..hf.model_dir import check_model_dir, kept_types
from ..hf.packed_attention import can_pack, pack_attention
from ..hf.stored_slices import TrainedSlice
from ..hf.training_state import load_model, resume, save_state
from ..lora.engine import Keep
from ..lora.joint import StartedPass
from ..lora.program_engine import ProgramEngine, ProgramPass
from ..lora.saved import check_saved
from ..optimizers.adamw import check_optimizer
from ..optimizers.settings import AdamParams
from ..rank_collectives import require_open
from ..torch_engine import micro_batches_of, outputs_by_sequence
from .loading import checked_model, decoder_layers, hold_as_stored, materialise
from .lora import Fsdp2Adapted
from .mesh import RankMesh
from .optimizers import PartwiseOptimizer, clip_gradients, moment_names
from .router_replay import RouterReplay
from .shards import local_shards, trained_slices

_MATRIX = 2
"""Dimensions of what Muon steps."""


class Fsdp2Engine(ProgramEngine):
    """Shards every decoder layer, and the rest of the model, over all ranks with ``fully_shard``.

    With tensor parallelism (``TrainerConfig.fsdp2``), neighbouring ranks share every matrix, and ``fully_shard`` shards over the
    ranks that hold the same part. With context parallelism, some of those compute a part of the same micro-batch each. Master
    weights and gradients are float32 ``DTensor``s, and moments are what ``trainer.optimizer`` makes them; with ``trainer.lora``,
    the model's own weights have the half precision of the checkpoint, if it has one. Forward and backward run in
    ``TrainerConfig.compute_dtype``.
    """

    optimizers = OPTIMIZERS

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._model: torch.nn.Module | None = None
        self._replay: RouterReplay | None = None

    @classmethod
    def check(cls, config: TrainerConfig, model_dir: Path, state: Path | None = None) -> None:
        """See `TrainingEngine.check`."""
        check_optimizer(config.optimizer)
        model, runs = checked_model(config, model_dir)
        if state is not None:
            matrices = _matrices(model)
            check_saved(state, config, model, runs, lambda name: moment_names(config, name, matrices))

    def setup(self, model_dir: Path, seed: int) -> None:
        """See `TrainingEngine.setup`."""
        head = self.config.head
        check_model_dir(model_dir, head)
        model, runs = checked_model(self.config, model_dir)
        self._join(model_dir, seed)
        self._packs = self.config.fsdp2.packing == "auto" and can_pack(model)
        self._shares = self._packs and self.config.fsdp2.shared_prefixes
        if self._packs:
            pack_attention(model)
        self._vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # of transformers' PreTrainedModel
        if head == "value":
            read_values(model)
        else:
            self._vocabulary = replace_head(model)
        if self.config.router_replay:
            self._replay = RouterReplay(model, decoder_layers(model))
        model.requires_grad_(self.config.trains_weights)
        if self.config.lora is not None:
            hold_as_stored(model, runs, model_dir)
        self._shard(model, runs, model_dir)
        materialise(model, self._device)
        with self._collective("the trainer ranks to load the model"):
            load_model(model_dir, head, self._shapes, self._trained_slices({}), self._device)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(trained.values())
        self._optimizer = PartwiseOptimizer(self.config, trained, _matrices(model), self._runs)
        self._adapt(model)

    def outline(self, model_dir: Path) -> None:
        """See `TrainingEngine.outline`."""
        model, runs = checked_model(self.config, model_dir)
        self._shard(model, runs, model_dir)
        if self.config.publishes_adapter:
            self._adapt(model, torch.device("cpu"))

    def forward_backward_together(self, calls: Sequence[ForwardBackward]) -> list[BackwardResult | WeightlaneError]:
        """See `AdapterEngine`: calls whose targets have the same shape share passes, if the model takes packed sequences."""
        if not self._packs:
            return super().forward_backward_together(calls)
        found: dict[int, BackwardResult | WeightlaneError] = {}
        passes: dict[int, StartedPass] = {}

        def fail(numbers: Iterable[int], error: WeightlaneError) -> None:
            """Answer these calls with `error`, and all that are left of the mini-batches that it dropped."""
            dropped = [number for number, each in passes.items() if self._begun(each.adapter) is None]
            for number in {*numbers, *dropped}:
                found[number] = error
                passes.pop(number, None)

        for number, call in enumerate(calls):
            try:
                passes[number] = self._started(call)
            except WeightlaneError as error:
                fail([number], error)
        while passes:
            shapes = {number: each.shape or number for number, each in passes.items()}
            group = [number for number, shape in shapes.items() if shape == next(iter(shapes.values()))]
            joined = [passes.pop(number) for number in group]
            try:
                found.update(zip(group, self._run_passes(joined), strict=True))
            except WeightlaneError as error:
                fail(group, error)
        return [found[number] for number in range(len(calls))]

    def _run_forward(self, batch: TokenBatch, outputs: Collection[OutputName], top_k: int, keep: Keep) -> None:
        self._loaded_model().eval()
        for indices, micro in self._share(batch, *self.data_share, padded=not self._packs, share_prefixes=self._shares):
            layout = self._layout([micro])
            with self._replayed(layout):
                keep(indices, micro, self._outputs(layout, outputs, top_k))

    def _run_passes(self, passes: Sequence[StartedPass]) -> list[BackwardResult]:
        self._loaded_model().train(self._dropout)
        needed = {name for each in passes for name in each.needed}
        adapters, batches = [each.adapter for each in passes], [each.call.batch for each in passes]
        found: list[dict[int, SequenceOutputs]] = [{} for _ in passes]
        packed_tokens = [0] * len(passes)
        limit = self._pass_tokens
        with self._collective("the gradients of the other ranks"), self._whole_gradients(*adapters):
            about = {"padded": not self._packs, "share_prefixes": self._shares_here}
            for share in micro_batches_of(batches, self.data_share, limit, self._device, **about):
                lengths = [len(micro.tokens) for *_, micro in share]
                layout = self._layout([micro for *_, micro in share])
                of_tokens = [adapters[number] for number, *_ in share]
                runs = [(each, count) for each, count in zip(of_tokens, layout.runs, strict=True) if each is not None]
                with self._replayed(layout), self._open_adapters().active_runs(runs):
                    joined = self._outputs(layout, needed)
                    losses = []
                    outputs_of_parts = zip(share, layout.counts, joined.split(lengths), strict=True)
                    for (number, indices, micro), count, outputs in outputs_of_parts:
                        each = passes[number]
                        packed_tokens[number] += count if indices else 0
                        losses.append(each.sums.add(each.call.function(outputs, micro)))
                        found[number] |= outputs_by_sequence(indices, micro, outputs, each.call.outputs)
                    self._run_backward(ProgramPass(runs, layout), losses, [torch.ones_like(loss) for loss in losses])
            return [self._result(*each) for each in zip(passes, packed_tokens, found, strict=True)]

    def _step_weights(self, before_change: Fence, params: AdamParams) -> float:
        with self._collective("the gradient norm of the other ranks"):
            self._mesh.complete_gradients(self._loaded_model())
            norm = clip_gradients(self._parameters, params.max_grad_norm)
        self._refuse_not_finite(norm, self._step, self._clear_gradients)
        self._forget_gathered()

        def about_to_change(names: Collection[str]) -> None:
            before_change(names)
            self._torn = True

        try:
            with self._collective("the matrices of the other ranks"):  # which Muon gathers
                self._optimizer.step(params, about_to_change)
        except BaseException:
            self._clear_gradients()  # they are clipped already, so no more may be accumulated
            raise
        self._torn = False
        return norm

    def _weight_shards(self, dtype: torch.dtype) -> list[LocalShard]:
        self._refuse_torn()
        return local_shards(self._runs, checkpoint_tensors(self._loaded_model()), self.rank, dtype, self._kept)

    def _save_weights(self, directory: Path, write_beside: Callable[[Path], None]) -> None:
        slices = self._trained_slices(self._optimizer.state)
        save_state(directory, slices, self._step, self.rank, self._device, write_beside)

    def _load_weights(self, directory: Path, *, optimizer: bool) -> int:
        self._forget_gathered()
        moments = self._optimizer.state
        state = self._shapes, self._trained_slices(moments), self.rank, self._device
        step = resume(directory, self.config.head, *state, optimizer=optimizer)
        self._optimizer.restore(moments)
        return step

    def _trained_slices(self, moments: Mapping[str, Mapping[str, torch.Tensor]]) -> list[TrainedSlice]:
        return trained_slices(self._runs, checkpoint_tensors(self._loaded_model()), moments)

    def close(self) -> None:
        """See `TrainingEngine.close`."""
        self._model = self._replay = None
        self._lora = None
        self._parameters = []
        self._optimizer = None  # type: ignore[assignment]  # nothing uses it once the model is gone
        self._leave()

    def _adapt(self, model: torch.nn.Module, device: torch.device | None = None) -> None:
        """Prepare the sharded `model` for adapters."""
        self._make_adapters(Fsdp2Adapted(model, decoder_layers(model), self._mesh, self._runs), device)

    def _shard(self, model: torch.nn.Module, runs: Sequence[CheckpointRun], model_dir: Path) -> None:
        """Shard `model`, whose checkpoint tensors are `runs`, over the ranks, in place. Collective."""
        self._runs, self._shapes = runs, {run.name: run.shape for run in runs}
        self._kept = kept_types(model_dir, self._shapes)
        with self._collective("the trainer ranks to shard the model"):
            self._mesh = RankMesh.of(self._device, self.world, self.config.fsdp2, self.config.collective_timeout_s)
            self._mesh.shard(model, decoder_layers(model), self.config, self._compute_dtype)
        self._model = model

    def _memory_of(self, part: StatePart) -> Iterable[torch.Tensor]:
        model, adapters = self._loaded_model(), self._open_adapters().memory_of(part)
        if part == "gradients":
            return [*adapters, *(parameter.grad for parameter in self._parameters if parameter.grad is not None)]
        if part == "optimizer":
            return [*adapters, *self._optimizer.memory]
        self._forget_gathered()  # which frees their memory, too
        return [*adapters, *model.parameters(), *model.buffers()]

    def _forget_gathered(self) -> None:
        """Let go of gathered parameters. Without ``reshard_after_forward``, a forward pass leaves them for the next pass."""
        for module in self._loaded_model().modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clear_gradients(self) -> None:
        self._away.pop("gradients", None)  # offloaded gradients are dropped, too
        self._optimizer.zero_grad()
        self._denominators = None

    def _loaded_model(self) -> torch.nn.Module:
        require_open(self._model is not None, self._part)
        assert self._model is not None
        return self._model

    def train(self, mode: bool) -> None:
        """See `TrainingEngine.train`; not with context parallelism, whose ranks draw the same numbers for different tokens."""
        if mode and self.config.fsdp2.context_parallel > 1:
            raise ConfigError(
                "trainer.fsdp2.context_parallel trains without dropout.",
                part=self._part,
                hint="Leave out train(True), or set trainer.fsdp2.context_parallel to 1.",
            )
        super().train(mode)

    @property
    def _pass_tokens(self) -> int:
        return self.config.micro_batch_tokens * self.config.fsdp2.context_parallel

    @property
    def data_share(self) -> tuple[int, int]:
        """See `AdaptedEngine.data_share`."""
        return self._mesh.data_share

    @property
    def _answers(self) -> bool:
        return self._mesh.answers

    @property
    def _modules(self) -> Iterable[torch.nn.Module]:
        return self._loaded_model().modules()

    @property
    def joins_slots(self) -> bool:
        """See `ProgramEngine.joins_slots`."""
        return self._packs

    @property
    def ranks_per_row(self) -> int:
        """See `ProgramEngine.ranks_per_row`."""
        return self.config.fsdp2.context_parallel

    def _lay_out(self, parts: Sequence[MicroBatch]) -> tuple[Layout, Sequence[int]]:
        layout = self._layout(parts)
        return layout, layout.runs

    def _run_pass(self, tokens: ProgramPass, query: PassQuery) -> dict[str, torch.Tensor]:
        self._loaded_model().train(self._dropout and torch.is_grad_enabled())
        return self._answer(tokens.laid_out, query)

    def _run_backward(
        self, tokens: ProgramPass, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        own = [parameter for adapter in tokens.adapters for parameter in adapter.parameters]
        if own:  # the gradients of the model's own weights stay as they are
            torch.autograd.backward(outputs, gradients, inputs=own)
        else:
            # FSDP averages gradients over the ranks, but their sum is wanted.
            torch.autograd.backward(outputs, [each * self._mesh.data.size() for each in gradients])

    def _scale_gradients(self, scale: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def _outputs(self, layout: Layout, wanted: Collection[OutputName], top_k: int = 0) -> ModelOutputs:
        """Run the model on a micro-batch, and its head on the tokens with targets."""
        query = PassQuery.of_targets(layout.micro, wanted, top_k)
        return ModelOutputs.at(query.rows, layout.micro, self._answer(layout, query))

    def _answer(self, layout: Layout, query: PassQuery) -> dict[str, torch.Tensor]:
        """Run the model on a micro-batch. Returns the outputs in `query` by their names in `ModelOutputs`, and ``logits``."""
        answer: dict[str, torch.Tensor] = self._loaded_model()(layout.asked(query), **layout.inputs)
        return answer

    def _layout(self, parts: Sequence[MicroBatch]) -> Layout:
        """Return the form in which the model computes `parts` of a micro-batch: one, unless it takes packed sequences."""
        if self._packs:
            layout = Layout.packed(parts, share=self._shares_here)
            return layout if self._mesh.context is None else split_layout(layout, self._mesh.context)
        (micro,) = parts
        return Layout.padded(micro)

    def _replayed(self, layout: Layout) -> AbstractContextManager[None]:
        """Route tokens to the experts in the batch, in a pass with `layout`, if ``trainer.router_replay`` is set."""
        return nullcontext() if self._replay is None else self._replay.active(layout)

    @property
    def _shares_here(self) -> bool:
        """Whether shared prefixes are computed once. With dropout, every sequence drops other activations of a prefix."""
        return self._shares and not (self._dropout and torch.is_grad_enabled())


def _matrices(model: torch.nn.Module) -> set[str]:
    """Return the names of the matrices inside decoder layers, which Muon takes."""
    inside = {parameter for layer in decoder_layers(model) for parameter in layer.parameters()}
    return {name for name, each in model.named_parameters() if each in inside and each.ndim == _MATRIX}
