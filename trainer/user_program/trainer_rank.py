"""`TrainerRank`: one rank of a user-written training program, with adapters in slots on a base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from weightlane.ckpt_engines import ConfigError, ForwardMemoryError, ProtocolError

from ..config import LoraConfig, TrainerConfig
from ..engines.contract import Fence
from ..engines.lora.peft_files import saved_config
from ..engines.lora.program_engine import ProgramEngine
from ..engines.optimizers.settings import AdamParams
from ..engines.rank_collectives import on_every_rank, share_json
from .inputs import PART, ForwardInput, ForwardInputs, check_tokens, digest, flattened, refuse_different
from .memory import MemoryEstimate, free_bytes
from .open_engine import OpenEngine
from .outputs import ForwardOutput, ForwardOutputs, MicroBatch, MicroBatchStats, shaped_like
from .packed_pass import PackedPass, by_slot, demand, filled_up, most_of
from .pass_runner import PassRunner
from .slots import BASE, SlotKind, Slots, called, plain
from .windows import parts_of, widest_window


class TrainerRank(Slots):
    """One rank of a program that torchrun, or anything that initialised torch.distributed, started on every rank.

    Slots add low-rank adapters to the model's own weights: *LoRAs*, which are not trained, and *checkpoints*, which have an
    optimizer. The model's own weights are a checkpoint, too, `BASE`, if `train_base` asks for it; else they are frozen. A slot's
    gradient is its own alone. Where the engine can, inputs of several slots are computed in one pass, see `ProgramEngine`.

    Every method but `close`, `set_*`, `push_*` and `pop_*` is collective: all ranks call it, in the same order. Ranks
    that share matrices or tokens (tensor or context parallel) pass the same inputs.

    Args:
        model_dir: The Hugging Face directory of the model.
        config: Engine, layout and precision, and the optimizer's name, which is for the model's own weights; ranks and settings
            of steps are not read. The engine must have adapters: fsdp2, or megatron without pipeline parallelism.
        memory_limit_bytes: Memory that forward passes and their graphs may take on this rank; None for all free memory.
        seed: Seeds torch's generators.
        train_base: Whether the model's own weights are trained.

    Raises:
        ConfigError: The model or a setting cannot work.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: TrainerConfig | None = None,
        *,
        memory_limit_bytes: int | None = None,
        seed: int = 0,
        train_base: bool = False,
    ) -> None:
        super().__init__(train_base=train_base)
        self._model_dir = Path(model_dir)
        self._open = OpenEngine(self._model_dir, config or TrainerConfig(), seed, train_base=train_base)
        self._limit = memory_limit_bytes
        self._estimate = MemoryEstimate(
            self.engine.layer_widths,
            self.engine.bytes_per_activation,
            self.engine.vocabulary,
            self._open.hidden,
        )
        self._runner = PassRunner(self.engine, self._estimate)

    @property
    def engine(self) -> ProgramEngine:
        """The training engine: for its checkpoint tensors, its device, and exports."""
        return self._open.engine

    @property
    def data_share(self) -> tuple[int, int]:
        """The index of the data parallel share that this rank computes, and the number of shares."""
        return self.engine.data_share

    def load_lora(self, name: str, source: str | Path) -> None:
        """Load an adapter that is not trained, from a directory of PEFT or `save`. It replaces one of that name. Collective.

        Raises the errors of `load_checkpoint`.
        """
        self._load("lora", name, Path(source), None)

    def load_checkpoint(self, name: str, source: str | Path | None = None, config: LoraConfig | None = None) -> None:
        """Load a trainable adapter, which replaces one of that name, or other weights of the model. Collective.

        Args:
            name: Letters, digits, dots, dashes and underscores; `BASE` for the model's own weights, which slots are then on.
            source: A directory that PEFT or `save` wrote; the optimizer that `save` wrote there is resumed. None for a fresh
                adapter, whose B is 0. For `BASE`, one of `save` or of a Hugging Face model; None for the model's first weights.
            config: Rank, scale, layers and seed of a fresh adapter.

        Raises:
            ConfigError: `source` holds no adapter for this model, or one that contradicts `config`, or a LoRA has that name; or
                the model's own weights are frozen, or not in `source`.
            ProtocolError: A forward pass that needs the values as they are still waits for its backward pass.
        """
        self._load("checkpoint", name, None if source is None else Path(source), config)

    def save(self, name: str, directory: str | Path) -> None:
        """Write a slot in PEFT's format, a checkpoint with its optimizer. `directory` must not exist. Collective.

        `BASE` is written as a training state of its engine, without adapters; see ``engine.export_hf`` for a Hugging Face model.
        """
        if self._slot(self._kinds.get(name, "checkpoint"), name) == BASE:
            self._refuse_frozen()
            self.engine.save(Path(directory), adapters=False)
        else:
            self.engine.export_adapter(Path(directory), name, with_optimizer=True)

    def dp_rank_forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Compute the inputs of this rank. Each data parallel rank has inputs of its own, any number, or none. Collective.

        Args:
            inputs: An input, or lists of them.

        Raises:
            ForwardMemoryError: The inputs of a rank don't fit into memory; nothing was computed.
            ProtocolError: The model doesn't have a token or target, on any rank; or ranks that hold parts of one model were
                given different inputs.
            ConfigError: There is no such slot.

        Returns:
            Outputs, nested like `inputs`. If torch's grad mode is on, those of checkpoints have a gradient.
        """
        flat: list[ForwardInput] = []

        def check() -> None:
            flat.extend(flattened(inputs))
            check_tokens(flat, self.engine.vocabulary)
            self._passes(flat)

        self._on_every_rank(check)
        self._require_alike(flat, by_share=True)
        passes, available = self._passes(flat), self._available()
        demands, costs = zip(*self._shared([self._demand(passes), sum(map(self._cost, flat))]), strict=True)
        if max(costs) > available:
            raise self._too_large("the inputs of a rank", max(costs), available)
        found = self._compute(passes, flat, most_of(demands))[0]
        return shaped_like(inputs, iter(found))

    def forward_micro_batches(self, inputs: Sequence[ForwardInputs]) -> Iterator[MicroBatch]:
        """Compute inputs that are the same on every rank, in the widest micro-batches that fit into memory. Collective.

        Items are divided among the data parallel ranks by their tokens, and never split: nest inputs that belong together. Call
        `backward` before requesting the next micro-batch; otherwise the outputs' graphs stay in memory.

        Args:
            inputs: Items: inputs, or lists of them.

        Raises:
            ForwardMemoryError: A single item doesn't fit; the items before it were computed.
            ProtocolError: The model doesn't have a token or target, or ranks were given different inputs; nothing was computed.
            ConfigError: There is no such slot; nothing was computed.

        Yields:
            Micro-batches, the same number on every rank.
        """
        items: list[list[ForwardInput]] = []

        def check() -> None:
            items.extend(list(flattened(item)) for item in inputs)
            flat = [each for item in items for each in item]
            check_tokens(flat, self.engine.vocabulary)
            self._passes(flat)

        self._on_every_rank(check)
        self._require_alike([each for item in items for each in item], by_share=False)
        first = 0
        while first < len(items):
            micro = self._next_micro_batch(inputs, items, first)
            first += micro.stats.items
            yield micro
            del micro  # only the program keeps its outputs alive

    def backward(self, loss: torch.Tensor | float = 0.0) -> None:
        """Run the backward passes of all forward passes with gradient since the last call. Collective.

        ``loss.backward()`` does the same if the losses of all ranks depend on the same forward passes, or, while the model's own
        weights are frozen, on the same number of them; with expert parallelism it is refused. This method also works if a rank
        had no inputs, or if its loss does not depend on all of its passes. A slot on whose outputs no rank's loss depends has no
        gradient.

        Args:
            loss: A scalar; a number, or a tensor without gradient, on a rank that contributes nothing.

        Raises:
            ProtocolError: Ranks dropped outputs, so that their backward passes differ; nothing was run, and the passes of ranks
                that had no inputs are dropped, too.
        """
        keys = self._shared([graph.key for graph in self._runner.graphs])
        if any(each != keys[0] for each in keys):
            self._runner.forget_idle()  # no program has outputs of them to drop
            counts = ", ".join(str(len(each)) for each in keys)
            raise ProtocolError(
                f"the ranks keep {counts} forward passes that wait for backward, not the same ones.",
                part=PART,
                hint="Keep the outputs of every rank until backward, or compute them under torch.no_grad() on all.",
            )
        self._runner.backward(loss)

    def zero_grad(self) -> None:
        """Drop the gradients of all checkpoints."""
        self.engine.zero_grad()
        self._runner.with_gradient.clear()

    def optim_step(
        self,
        params: AdamParams,
        scale_grads: float = 1.0,
        checkpoints: Sequence[str] | None = None,
        *,
        before_change: Fence | None = None,
    ) -> dict[str, float]:
        """Take one step with the gradients, summed over the ranks, and drop them. Collective.

        Adapters are stepped by AdamW, the model's own weights by ``trainer.optimizer``. A step of the latter changes what every
        slot computes.

        Args:
            params: AdamW's settings.
            scale_grads: Factor for the gradients, applied first: 1 / n, if losses were sums over n tokens of all ranks.
            checkpoints: The checkpoints to step; None for all that have a gradient on any rank.
            before_change: Called before tensors of the model's own weights change, with their names, see
                `TrainingEngine.optim_step`: the fence of a publisher.

        Raises:
            GradientError: A gradient is not finite. No checkpoint has changed, and the gradients of all of them are dropped.
            ProtocolError: A checkpoint has no gradient, or one of its forward passes waits for backward, as any pass does for the
                model's own weights; nothing has changed.
            ConfigError: There is no such checkpoint, or the model's own weights are frozen.

        Returns:
            The L2 norm of each checkpoint's gradient, scaled and before clipping.
        """
        state = self._shared([sorted(self._runner.with_gradient), self._live_slots])
        known = {name for gradients, _ in state for name in gradients}
        names = [name for name in self._trained if name in known]
        if checkpoints is not None:
            names = [self._slot("checkpoint", name) for name in checkpoints]
        if BASE in names:
            self._refuse_frozen()
        self._refuse_live(names, [name for _, live in state for name in live])
        if not names or not known.issuperset(names):
            of = f" of {', '.join(sorted(map(called, {*names} - known)))}" if names else ""
            raise ProtocolError(f"there is no gradient{of}.", part=PART, hint="Call backward before optim_step.")
        self._runner.with_gradient.difference_update(names)
        return self.engine.step_slots(names, params, scale_grads, before_change or (lambda _: None))

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._runner.forget_idle()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shared(self, value: Any) -> list[Any]:
        """Gather `value` from every rank. Collective."""
        with self._open.collective():
            return share_json(value, self.engine.device)

    def _on_every_rank(self, action: Callable[[], object]) -> None:
        """Run `action`. If it fails on any rank, every rank raises. Collective."""
        with self._open.collective():
            on_every_rank(action, self.engine.device, PART)

    def _load(self, kind: SlotKind, name: str, source: Path | None, config: LoraConfig | None) -> None:
        self._refuse_live([name], [each for names in self._shared(self._live_slots) for each in names])
        if name == BASE and kind == "checkpoint":
            self._load_base(source, config)
            return
        if self._kinds.get(name, kind) != kind:
            raise ConfigError(
                f"{name!r} is the name of a {plain(self._kinds[name])}.", part=PART, hint="Choose another."
            )
        settings: list[LoraConfig] = []

        def read() -> None:
            settings.append(config or (LoraConfig() if source is None else saved_config(source)))

        self._on_every_rank(read)
        self.engine.add_adapter(name, settings[0], source, replace=True, resume=True, trained=kind == "checkpoint")
        self._kinds[name] = kind
        self._runner.with_gradient.discard(name)

    def _load_base(self, source: Path | None, config: LoraConfig | None) -> None:
        self._refuse_frozen()
        if config is not None:
            raise ConfigError("the model's own weights have no LoraConfig.", part=PART, hint="Leave it out.")
        self.engine.load(source or self._model_dir, adapters=False)
        self._runner.with_gradient.discard(BASE)

    def _require_alike(self, flat: Sequence[ForwardInput], *, by_share: bool) -> None:
        """Raise unless all ranks, or all of a data parallel share, were given the same inputs. Collective."""
        refuse_different(self._shared([self.data_share[0] if by_share else 0, digest(flat, self._slot_of)]))

    @property
    def _live_slots(self) -> list[str]:
        """The slots of forward passes of this rank that wait for their backward pass."""
        return sorted({slot for graph in self._runner.graphs for slot in graph.slots})

    def _refuse_live(self, names: Sequence[str], live: Sequence[str]) -> None:
        for name in names:
            # Every slot computes with the model's own weights.
            if waiting := sorted(called(each) for each in {*live} if name in (BASE, each)):
                raise ProtocolError(
                    f"a forward pass of {waiting[0]} waits for its backward pass, which needs {called(name)} unchanged.",
                    part=PART,
                    hint="Call backward first, or drop the outputs of its pass, which other slots may share; compute under"
                    " torch.no_grad() what needs no gradient.",
                )

    def _passes(self, flat: Sequence[ForwardInput]) -> list[PackedPass]:
        trained = self._trained if torch.is_grad_enabled() else []
        return by_slot(flat, [self._slot_of(each) for each in flat], trained, joined=self.engine.joins_slots)

    def _demand(self, passes: Sequence[PackedPass]) -> dict[str, int]:
        return demand(passes, by_slot=self.engine.exchanges_tokens)

    def _cost(self, each: ForwardInput) -> int:
        gradient = torch.is_grad_enabled() and each.has_gradient and self._slot_of(each) in self._trained
        return self._estimate.of(each, gradient=gradient)

    def _available(self) -> int:
        """Bytes for inputs on the rank that has least. Adopts the highest memory estimate of all ranks. Collective."""
        live = sum(graph.nbytes for graph in self._runner.graphs)
        left = free_bytes(self.engine.device) if self._limit is None else self._limit - live
        told = self._shared([left, self._estimate.to_plain()])
        self._estimate.raise_to([each[1] for each in told])
        return min(int(each[0]) for each in told) - self._estimate.most_fixed

    def _next_micro_batch(
        self, inputs: Sequence[ForwardInputs], items: Sequence[Sequence[ForwardInput]], first: int
    ) -> MicroBatch:
        available = self._available()
        rank, world = self.data_share
        costs = [sum(self._cost(each) for each in item) for item in items[first:]]
        tokens = [sum(len(each.tokens) for each in item) for item in items[first:]]
        width = widest_window(costs, tokens, world, available)
        if not width:
            raise self._too_large(f"item {first}", costs[0], available)
        parts = parts_of(tokens[:width], world)
        shares = [[first + index for index in part] for part in parts]
        flats = [[each for index in share for each in items[index]] for share in shares]
        passes, indices, flat = [self._passes(each) for each in flats], shares[rank], flats[rank]
        found, measured = self._compute(passes[rank], flat, most_of(map(self._demand, passes)))
        outputs = iter(found)
        mine = [inputs[index] for index in indices]
        cost = max(sum(costs[part.start : part.stop]) for part in parts)
        stats = MicroBatchStats(first, width, sum(len(each.tokens) for each in flat), cost, available, measured)
        return MicroBatch(mine, [shaped_like(each, outputs) for each in mine], indices, stats)

    def _compute(
        self, passes: Sequence[PackedPass], flat: Sequence[ForwardInput], most: Mapping[str, int]
    ) -> tuple[list[ForwardOutput], int]:
        """Run this rank's passes, and empty ones up to `most`. Returns outputs in the order of `flat`, and measured bytes."""
        found: dict[int, ForwardOutput] = {}
        total = 0
        adapter = next(iter(self._checkpoints), BASE)
        for each in filled_up(passes, most, adapter, by_slot=self.engine.exchanges_tokens):
            outputs, measured = self._runner.run(each)
            total += measured
            found |= {id(asked): output for asked, output in zip(each.inputs, outputs, strict=True)}
        return [found[id(each)] for each in flat], total

    def _too_large(self, named: str, predicted: int, available: int) -> ForwardMemoryError:
        return ForwardMemoryError(
            f"{named} would take {predicted} bytes in a forward pass, and {available} are available.",
            part=PART,
            hint="Give shorter or fewer inputs, leave out logits, or drop outputs that still wait for backward.",
        )
