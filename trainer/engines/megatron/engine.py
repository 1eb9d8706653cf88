"""The training engine on megatron-core: tensor, pipeline, sequence, expert and data parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from weightlane.sync.version.tensor_spec import LocalShard

from ...config import TrainerConfig
from ...data.batch import TokenBatch
from ...data.sequences import MicroBatch
from ...objectives.loss import ModelOutputs, OutputName
from ..contract import BackwardResult, Fence, SequenceOutputs, StatePart, TrainingEngine
from ..head import PassQuery
from ..hf.checkpoint import CheckpointRun, checkpoint_runs, checkpoint_tensors, model_without_weights, stored_weights
from ..hf.layout import Layout
from ..hf.model_dir import check_model_dir, kept_types, stored_types
from ..hf.stored_slices import TrainedSlice
from ..hf.training_state import load_model, resume, save_state
from ..lora.engine import Keep
from ..lora.joint import StartedPass
from ..lora.program_engine import ProgramEngine, ProgramPass
from ..lora.saved import check_saved
from ..optimizers.adamw import check_optimizer
from ..optimizers.settings import AdamParams, Moments
from ..rank_collectives import require_open
from ..torch_engine import outputs_by_sequence
from .model_facts import ModelFacts, read_model
from .process.layout_check import check_layout, refuse_cpu_beside_cuda

with warnings.catch_warnings():
    # Without TransformerEngine and Apex, megatron-core says several times that it uses torch instead.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from .data_parallel import (
        clear_gradients,
        complete_sums,
        data_parallel_chunks,
        frozen,
        gather_parameters,
        gradient_buffers,
        keep_sums_once,
        not_summed,
    )
    from .head import head_answer, head_of
    from .lora import MegatronAdapted, check_lora
    from .model import forget_caches, transformer_config
    from .process.parallel_groups import ParallelGroups, join_parallel_groups, leave_parallel_groups
    from .rows import PackedRow, run_chunk
    from .weights import (
        copy_masters_to_model,
        held_tensors,
        inner_optimizers,
        megatron_optimizer,
        moment_memory,
        moments_of,
        restore_moments,
        shards_of,
        weight_slices,
    )


class MegatronEngine(ProgramEngine):
    """Splits the model over the ranks as ``trainer.megatron`` says, and trains it with megatron-core's own schedules.

    Master weights and gradients are float32, moments are what ``trainer.optimizer`` makes them, and passes are in
    ``TrainerConfig.compute_dtype``. The model has no dropout, since one that the rollout does not have would only add noise to
    the importance weights. Where there is no GPU, `without_gpu` answers megatron-core's CUDA calls, and logs a warning.
    """

    optimizers = ("adamw", "adamw_bf16", "adamw_8bit")

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._chunks: list[Any] = []
        self._slices: list[TrainedSlice] = []
        self._optimizer: Any = None
        self._groups: ParallelGroups | None = None

    @classmethod
    def check(cls, config: TrainerConfig, model_dir: Path, state: Path | None = None) -> None:
        """See `TrainingEngine.check`."""
        check_optimizer(config.optimizer)
        facts, model, runs = _read(config, model_dir, config.ranks)
        if state is not None:
            check_saved(state, config, model, runs)
        if config.lora is not None:
            check_lora(facts.shape, {run.name: run.shape for run in runs}, config.lora)

    def setup(self, model_dir: Path, seed: int) -> None:
        """See `TrainingEngine.setup`."""
        check_model_dir(model_dir, self.config.head)
        self._describe(model_dir)
        self._join(model_dir, seed)
        with self._computing("the trainer ranks to build the model"):
            self._build(seed, {} if self.config.lora is None else stored_types(model_dir))
            load_model(model_dir, self.config.head, self._shapes, self._slices, self._device)
            copy_masters_to_model(self._chunks, self._optimizer)
            self._adapt()

    def outline(self, model_dir: Path) -> None:
        """See `TrainingEngine.outline`."""
        self._describe(model_dir)
        self._device = torch.device("meta")
        with self._computing("the trainer ranks to build the model"):
            self._build(seed=0, stored={})
            if self.config.publishes_adapter:
                self._adapt(torch.device("cpu"))

    def _run_forward(self, batch: TokenBatch, outputs: Collection[OutputName], top_k: int, keep: Keep) -> None:
        self._run(batch, outputs, keep, forward_only=True, top_k=top_k)

    def _run_passes(self, passes: Sequence[StartedPass]) -> list[BackwardResult]:
        (one,) = passes
        batch, loss, sums = one.call.batch, one.call.function, one.sums
        found: dict[int, SequenceOutputs] = {}

        def judge(indices: list[int], micro: MicroBatch, computed: ModelOutputs) -> torch.Tensor:
            found.update(outputs_by_sequence(indices, micro, computed, one.call.outputs))
            return sums.add(loss(computed, micro))

        with (
            self._computing("the activations and gradients of the other ranks"),
            self._whole_gradients(one.adapter),
            self._open_adapters().active_runs([(one.adapter, 0)]),
            nullcontext() if one.adapter is None else frozen(self._chunks),
        ):
            if one.adapter is None:
                keep_sums_once(self._chunks)
            computed = self._run(batch, one.needed, judge, forward_only=False)
            if one.adapter is None:
                complete_sums(self._chunks)
            if not parallel_state.is_pipeline_last_stage():  # an empty call gives the names of the sums
                nothing = MicroBatch.without_targets(batch.sequences[0], batch.sequences_per_unit).to(self._device)
                sums.add(loss(ModelOutputs.nothing(nothing, self._facts.shape.hidden), nothing))
            return [self._result(one, computed, found)]

    def _step_weights(self, before_change: Fence, params: AdamParams) -> float:
        """Step everything at once: `before_change` is called once, with all names."""
        with self._computing("the gradients of the other ranks"):
            complete_sums(self._chunks)
            finalize_model_grads(self._chunks)
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
        self._refuse_not_finite(norm, self._step, self._clear_gradients)
        inner = inner_optimizers(self._optimizer)
        for optimizer in inner:
            params.set_in(optimizer.optimizer)
        try:
            before_change(self._changing)
        except BaseException:
            self._clear_gradients()  # they are summed over the ranks already, so no more may be accumulated
            raise
        self._torn = True
        with self._computing("the parameters of the other ranks"):
            for optimizer in inner:
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), params.max_grad_norm, norm)
            self._optimizer.step_with_ready_grads()
        self._torn = False
        return norm

    def _weight_shards(self, dtype: torch.dtype) -> list[LocalShard]:
        require_open(bool(self._chunks), self._part)
        self._refuse_torn()
        dtypes = {name: torch.float32 if name in self._kept else dtype for name in self._shapes}
        return shards_of(self._slices, self._shapes, dtypes, self._device)

    def _save_weights(self, directory: Path, write_beside: Callable[[Path], None]) -> None:
        where = self._step, self.rank, self._device
        save_state(directory, self._trained_slices(moments_of(self._optimizer)), *where, write_beside)

    def _load_weights(self, directory: Path, *, optimizer: bool) -> int:
        gather_parameters(self._chunks)
        moments = moments_of(self._optimizer)
        state = self._shapes, self._trained_slices(moments), self.rank, self._device
        step = resume(directory, self.config.head, *state, optimizer=optimizer)
        restore_moments(self._optimizer, moments)
        copy_masters_to_model(self._chunks, self._optimizer)
        return step

    def close(self) -> None:
        """See `TrainingEngine.close`."""
        forget_caches(self._chunks)
        self._chunks, self._slices = [], []
        self._optimizer = self._lora = None
        if self._groups is not None:
            leave_parallel_groups(self._groups)
        self._groups = None
        self._leave()

    @property
    def data_share(self) -> tuple[int, int]:
        """See `AdaptedEngine.data_share`."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    @property
    def _pass_tokens(self) -> int:
        return self.config.micro_batch_tokens * self.config.megatron.context_parallel

    @property
    def _modules(self) -> Iterable[torch.nn.Module]:
        return (module for chunk in self._chunks for module in chunk.modules())

    def _choose_device(self) -> torch.device:
        refuse_cpu_beside_cuda(self.config)
        return super()._choose_device()

    @contextmanager
    def _computing(self, waiting_for: str) -> Iterator[None]:
        """See `AdaptedEngine._computing`; around every call into megatron-core."""
        answered: AbstractContextManager[None] = nullcontext()
        if self._device.type != "cuda":
            from .process.without_gpu import cuda_calls_on  # noqa: PLC0415 - not where there is a GPU

            answered = cuda_calls_on(self._device)
        with self._collective(waiting_for), answered:
            yield

    def _describe(self, model_dir: Path) -> None:
        """Read the facts about the model and its checkpoint that are needed to build it, and check files and layout."""
        self._facts, model, runs = _read(self.config, model_dir, self.world)
        self._vocabulary = self._facts.shape.vocab
        trained = {name for name, _ in model.named_parameters()}
        self._changing = [run.name for run in runs if run.source in trained]
        self._shapes = {run.name: run.shape for run in runs}
        self._kept = kept_types(model_dir, self._shapes)

    def _build(self, seed: int, stored: Mapping[str, torch.dtype]) -> None:
        """Join megatron-core's groups, and create the model's chunks, gradient buffers and optimizer, without loading weights."""
        self._groups, self._coordinates = join_parallel_groups(self.config)
        model_parallel_cuda_manual_seed(seed)
        settings = self.config
        config = transformer_config(settings, self._facts, device=self._device, dtype=self._compute_dtype)
        self._chunks = chunks = data_parallel_chunks(settings, config, self._facts, self._device)
        where = self._facts.shape, self._coordinates
        self._optimizer = megatron_optimizer(settings, config, chunks, *where, stored)
        self._slices = self._trained_slices()
        self._clear_gradients()

    def _trained_slices(self, moments: Moments | None = None) -> list[TrainedSlice]:
        where = self._facts.shape, self._shapes, self._coordinates
        return weight_slices(self._chunks, self._optimizer, *where, moments)

    train = TrainingEngine.train  # this engine has no dropout

    def _adapt(self, device: torch.device | None = None) -> None:
        """Prepare the built model for adapters."""
        where = self._shapes, self._coordinates, self.config.megatron
        self._make_adapters(MegatronAdapted(self._chunks, self._facts.shape, *where), device)

    def _memory_of(self, part: StatePart) -> Iterable[torch.Tensor]:
        adapters = self._open_adapters().memory_of(part)
        if part == "parameters":
            return [*adapters, *held_tensors(self._chunks), *(piece.weight for piece in self._slices)]
        if part == "gradients":
            return [*adapters, *gradient_buffers(self._chunks)]
        return [*adapters, *moment_memory(self._optimizer)]

    def _clear_gradients(self) -> None:
        self.onload(["gradients"])  # gradients have permanent buffers, which must be on the device to be cleared
        self._denominators = None
        self._optimizer.zero_grad()
        with self._collective("the sums of gradients, which have begun"):
            clear_gradients(self._chunks)

    def _run(
        self,
        batch: TokenBatch,
        wanted: Collection[OutputName],
        use: Callable[[list[int], MicroBatch, ModelOutputs], torch.Tensor | None],
        *,
        forward_only: bool,
        top_k: int = 0,
    ) -> int:
        """Run this rank's share of `batch` through megatron-core's schedule: forward, and backward unless `forward_only`.

        On the last pipeline stage, `use` takes the indices of a micro-batch's sequences, the micro-batch and the model's outputs
        for it, and returns its part of the loss, if there is one. Returns how many tokens were computed, on that stage.
        """
        share, computed = self._micro_batches(batch), 0
        replayed = self._facts.shape if self.config.router_replay else None

        def forward(parts: Iterator[tuple[list[int], Layout]], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            indices, laid_out = next(parts)
            micro = laid_out.micro
            row = PackedRow.of(laid_out, self.config.megatron, replayed)

            def finish(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
                nonlocal computed
                computed += sum(laid_out.counts) if indices else 0
                query = PassQuery.of_targets(micro, wanted, top_k)
                answer = head_answer(hidden[0], head_of(chunk), row.layout.asked(query), self._vocabulary)
                loss = use(indices, micro, ModelOutputs.at(query.rows, micro, answer))
                nothing = torch.zeros((), dtype=torch.int, device=hidden.device)
                return nothing.float() if loss is None else loss, nothing, {}

            return run_chunk(chunk, row), finish

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(share) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(share),
            seq_length=len(share[0][1].micro.tokens),  # lengths vary, and are sent along
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return computed

    @property
    def joins_slots(self) -> bool:
        """See `ProgramEngine.joins_slots`: sequence and context parallelism cut runs of tokens anywhere, as do experts."""
        layout, experts = self.config.megatron, self._facts.shape.experts
        return not (layout.sequence_parallel or layout.context_parallel > 1 or experts)

    @property
    def exchanges_tokens(self) -> bool:
        """See `ProgramEngine.exchanges_tokens`: each rank has experts for the tokens of all."""
        return self.config.megatron.expert_parallel > 1

    @property
    def _shares(self) -> bool:
        return self.config.megatron.shares_prefixes and self._facts.shape.delta is None

    def _layout(self, parts: Sequence[MicroBatch]) -> Layout:
        layout = self.config.megatron
        multiple = layout.tensor_parallel if layout.sequence_parallel else 1
        return Layout.packed(parts, share=self._shares, multiple=multiple)

    def _lay_out(self, parts: Sequence[MicroBatch]) -> tuple[Layout, Sequence[int]]:
        laid_out = self._layout(parts)
        return laid_out, laid_out.counts

    def _run_pass(self, tokens: ProgramPass, query: PassQuery) -> dict[str, torch.Tensor]:
        (chunk,) = self._chunks
        gather_parameters(self._chunks)
        with frozen(self._chunks) if tokens.adapters else nullcontext():
            row = PackedRow.of(tokens.laid_out, self.config.megatron)
            (hidden,) = run_chunk(chunk, row)
            return head_answer(hidden, head_of(chunk), row.layout.asked(query), self._vocabulary)

    def _run_backward(
        self, tokens: ProgramPass, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        # Recomputation asks what has a gradient again.
        with frozen(self._chunks) if tokens.adapters else not_summed(self._chunks):
            torch.autograd.backward(outputs, gradients)

    def _scale_gradients(self, scale: float) -> None:
        for buffer in gradient_buffers(self._chunks):
            buffer.mul_(scale)

    def _micro_batches(self, batch: TokenBatch) -> list[tuple[list[int], Layout]]:
        """This rank's share of the batch, the same on all stages of its pipeline."""
        share = self._share(batch, *self.data_share, padded=False, share_prefixes=self._shares)
        if self.config.megatron.virtual_pipeline > 1:
            # The interleaved schedule needs a multiple of the number of pipeline ranks.
            nothing = MicroBatch.without_targets(batch.sequences[0], batch.sequences_per_unit).to(self._device)
            share += [([], nothing) for _ in range(-len(share) % self.config.megatron.pipeline_parallel)]
        return [(indices, self._layout([micro])) for indices, micro in share]

    @property
    def _answers(self) -> bool:
        ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        return bool(parallel_state.is_pipeline_last_stage()) and ranks == (0, 0)


def _read(
    config: TrainerConfig, model_dir: Path, ranks: int
) -> tuple[ModelFacts, torch.nn.Module, list[CheckpointRun]]:
    """Return the facts about a model, transformers' model without weights, and its checkpoint tensors.

    Raises `ConfigError` for a model, files or a layout with which `ranks` ranks cannot train.
    """
    facts = read_model(model_dir, config.head)
    check_layout(config, facts.shape, ranks)
    model = model_without_weights(model_dir, config.head)
    runs = checkpoint_runs(model, checkpoint_tensors(model))
    stored_weights(model, model_dir, config.head, {run.name: run.shape for run in runs})
    return facts, model, runs
