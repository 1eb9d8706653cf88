"""`TrainerRank`: one rank of a training program of one's own, with adapters in slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from weightlane.ckpt_engines import ConfigError, ForwardMemoryError, ProtocolError

from ..config import LoraConfig, TrainerConfig
from ..engines.lora.engine import AdaptedEngine
from ..engines.lora.peft_files import saved_config
from ..engines.optimizer_settings import AdamParams
from ..engines.rank_collectives import on_every_rank, share_json
from .inputs import PART, ForwardInput, ForwardInputs, check_tokens, flattened
from .likeness import digest, refuse_different
from .live_graphs import LiveGraph
from .memory import MemoryEstimate, Meter, free_bytes
from .micro_batch import MicroBatch, MicroBatchStats
from .open_engine import OpenEngine
from .outputs import ForwardOutput, ForwardOutputs, shaped_like
from .packed_pass import PackedPass, by_slot
from .slots import SlotChoice, SlotKind, plain
from .windows import part_of, planned_windows, window_cost


class TrainerRank(SlotChoice):
    """One rank of a program that torchrun, or anything that initialised torch.distributed, started on every rank.

    The model's own weights stay as they are. Beside them are slots: *LoRAs*, which only compute, and *checkpoints*, which are
    low-rank adapters with an optimizer. Every method but `close`, `set_*`, `push_*` and `pop_*` is collective: all ranks call it,
    in the same order. Ranks of tensor parallelism give the same inputs.

    Args:
        model_dir: The Hugging Face directory of the model.
        config: Engine, layout and precision; optimizer and ranks are not read. Its engine is one that has adapters: fsdp2, or
            megatron without pipeline parallelism.
        memory_limit_bytes: Memory that forward passes and their graphs may take on this rank; None for what is free.
        seed: Seeds torch's generators.

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
    ) -> None:
        super().__init__()
        self._open = OpenEngine(Path(model_dir), config or TrainerConfig(), seed)
        self._limit = memory_limit_bytes
        self._estimate = MemoryEstimate(
            self._engine.layer_widths,
            self._engine.bytes_per_activation,
            self._engine.vocabulary,
            self._open.hidden,
        )
        self._live: list[weakref.ref[LiveGraph]] = []
        self._idle: list[LiveGraph] = []
        """Graphs of passes in which this rank only took part for the others; nobody else holds them."""
        self._with_gradient: set[str] = set()
        """Checkpoints that this rank has a gradient of."""

    @property
    def engine(self) -> AdaptedEngine:
        """The training engine: for its checkpoint tensors, its device, and exports."""
        return self._engine

    @property
    def data_share(self) -> tuple[int, int]:
        """The data parallel share that this rank computes, and how many there are."""
        return self._engine.data_share

    def load_lora(self, name: str, source: str | Path) -> None:
        """Load an adapter that only computes, as PEFT or `save` wrote it, in place of one of that name. Collective.

        Raises as `load_checkpoint`.
        """
        self._load("lora", name, Path(source), None)

    def load_checkpoint(self, name: str, source: str | Path | None = None, config: LoraConfig | None = None) -> None:
        """Load an adapter that is trained, in place of one of that name. Collective.

        Args:
            name: Letters, digits, dots, dashes and underscores.
            source: A directory that PEFT or `save` wrote; it goes on with the optimizer that `save` wrote there. None for a fresh
                one, whose B is 0.
            config: Rank, scale, layers and seed of a fresh one.

        Raises:
            ConfigError: `source` holds no adapter for this model, or another than `config` says; or the name is taken otherwise.
            ProtocolError: A forward pass of it still waits for its backward pass.
        """
        self._load("checkpoint", name, None if source is None else Path(source), config)

    def save(self, name: str, directory: str | Path) -> None:
        """Write a slot as PEFT does, a checkpoint with its optimizer beside it. `directory` must not exist. Collective."""
        self._slots.named(self._slots.kinds.get(name, "checkpoint"), name)
        self._engine.export_adapter(Path(directory), name, with_optimizer=True)

    def dp_rank_forward(self, inputs: ForwardInputs) -> ForwardOutputs:
        """Compute inputs of this rank: other data parallel ranks have others, and any number of them, none included. Collective.

        Args:
            inputs: An input, or lists of them.

        Raises:
            ForwardMemoryError: They don't fit; nothing was computed.
            ProtocolError: The model doesn't have a token or target of theirs, on any rank; or ranks that hold parts of one model
                were given other inputs.
            ConfigError: There is no such slot.

        Returns:
            Outputs, nested like `inputs`. Where torch's grad mode is on, those of checkpoints have a gradient.
        """
        flat: list[ForwardInput] = []

        def check() -> None:
            flat.extend(flattened(inputs))
            check_tokens(flat, self._engine.vocabulary)
            self._passes(flat)

        self._on_every_rank(check)
        self._require_alike(flat, by_share=True)
        passes, available = self._passes(flat), self._available()
        with_gradient = sum(each.gradient for each in passes)
        told = self._shared([with_gradient, len(passes) - with_gradient, sum(self._cost(each) for each in flat)])
        most = [max(int(each[number]) for each in told) for number in range(3)]
        if most[2] > available:
            raise self._too_large("the inputs of a rank", most[2], available)
        found = self._compute(passes, flat, (most[0], most[1]))[0]
        return shaped_like(inputs, iter(found))

    def forward_micro_batches(self, inputs: Sequence[ForwardInputs]) -> Iterator[MicroBatch]:
        """Compute inputs that every rank is given alike, in the widest micro-batches that fit. Collective.

        Its items are divided among the data parallel ranks, and never split: nest what belongs together. Call `backward` before
        the next micro-batch is asked for, or keep the outputs' graphs in memory.

        Args:
            inputs: Items: inputs, or lists of them.

        Raises:
            ForwardMemoryError: An item doesn't fit alone; the ones before it were computed.
            ProtocolError: The model doesn't have a token or target of theirs, or ranks were given different inputs; nothing was
                computed.
            ConfigError: There is no such slot; nothing was computed.

        Yields:
            Micro-batches, as many on every rank.
        """
        items: list[list[ForwardInput]] = []

        def check() -> None:
            items.extend(list(flattened(item)) for item in inputs)
            flat = [each for item in items for each in item]
            check_tokens(flat, self._engine.vocabulary)
            self._passes(flat)

        self._on_every_rank(check)
        self._require_alike([each for item in items for each in item], by_share=False)
        first = 0
        while first < len(items):
            micro = self._next_micro_batch(inputs, items, first)
            first += micro.stats.items
            yield micro
            del micro  # its outputs are the program's alone

    def backward(self, loss: torch.Tensor | float = 0.0) -> None:
        """Run the backward passes of everything that was computed with gradient since the last call. Collective.

        ``loss.backward()`` does the same where the losses of all ranks lead to as many forward passes. This call also takes part
        where this rank had no inputs, or its loss does not need them all.

        Args:
            loss: A scalar; a number, or a tensor without gradient, on a rank that has nothing to add.

        Raises:
            ProtocolError: Ranks dropped outputs, so that their numbers of backward passes differ; nothing was run.
        """
        graphs = self._graphs()
        if len(set(counts := self._shared(len(graphs)))) > 1:
            raise ProtocolError(
                f"the ranks keep {', '.join(map(str, counts))} forward passes that wait for backward.",
                part=PART,
                hint="Keep the outputs of every rank until backward, or compute them under torch.no_grad() on all.",
            )
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for graph in reversed(graphs):
            if graph.waits:
                graph.backward()
        self._idle.clear()

    def zero_grad(self) -> None:
        """Drop the gradients of all checkpoints."""
        self._engine.zero_grad()
        self._with_gradient.clear()

    def optim_step(
        self, params: AdamParams, scale_grads: float = 1.0, checkpoints: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Take one step of AdamW with the gradients, added up over the ranks, and drop them. Collective.

        Args:
            params: How.
            scale_grads: Gradients are multiplied by it first: 1 / n, if losses were sums over n tokens of all ranks.
            checkpoints: Which ones; None for all that have a gradient on any rank.

        Raises:
            GradientError: The gradient of one is not finite; none has changed, and all these gradients are gone.
            ProtocolError: One has no gradient, or a forward pass of it waits for its backward pass; nothing has changed.
            ConfigError: There is no such checkpoint.

        Returns:
            The L2 norm of each one's gradient, scaled and before clipping.
        """
        state = self._shared([sorted(self._with_gradient), sorted({each.slot for each in self._graphs()})])
        known = {name for gradients, _ in state for name in gradients}
        names = [name for name in self._slots.checkpoints if name in known]
        if checkpoints is not None:
            names = [self._slots.named("checkpoint", name) for name in checkpoints]
        self._refuse_live(names, [name for _, live in state for name in live])
        if not names or not known.issuperset(names):
            of = f" of {', '.join(sorted({*names} - known))}" if names else ""
            raise ProtocolError(f"there is no gradient{of}.", part=PART, hint="Call backward before optim_step.")
        self._with_gradient.difference_update(names)
        return self._engine.step_adapters(names, params, scale_grads)

    def close(self) -> None:
        """Free the model. Any number of times."""
        self._idle.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> AdaptedEngine:
        return self._open.engine

    def _shared(self, value: Any) -> list[Any]:
        """`value` of every rank. Collective."""
        with self._open.collective():
            return share_json(value, self._engine.device)

    def _on_every_rank(self, action: Callable[[], object]) -> None:
        """Run `action`; where it fails on any rank, every rank raises. Collective."""
        with self._open.collective():
            on_every_rank(action, self._engine.device, PART)

    def _load(self, kind: SlotKind, name: str, source: Path | None, config: LoraConfig | None) -> None:
        live = self._shared(sorted({each.slot for each in self._graphs()}))
        self._refuse_live([name], [each for names in live for each in names])
        if self._slots.kinds.get(name, kind) != kind:
            raise ConfigError(
                f"{name!r} is the name of a {plain(self._slots.kinds[name])}.", part=PART, hint="Choose another."
            )
        settings: list[LoraConfig] = []
        fresh = config or LoraConfig()
        read = lambda: settings.append(fresh if config or source is None else saved_config(source))  # noqa: E731
        self._on_every_rank(read)
        self._engine.add_adapter(name, settings[0], source, replace=True, resume=True, trained=kind == "checkpoint")
        self._slots.kinds[name] = kind
        self._with_gradient.discard(name)

    def _require_alike(self, flat: Sequence[ForwardInput], *, by_share: bool) -> None:
        """Raise unless all ranks, or all of a data parallel share, were given the same inputs. Collective."""
        refuse_different(self._shared([self.data_share[0] if by_share else 0, digest(flat, self._slots.of)]))

    def _refuse_live(self, names: Sequence[str], live: Sequence[str]) -> None:
        for name in names:
            if name in live:
                raise ProtocolError(
                    f"a forward pass of {name!r} waits for its backward pass, which needs its values as they are.",
                    part=PART,
                    hint="Call backward first, or drop the outputs; compute under torch.no_grad() what needs no gradient.",
                )

    def _graphs(self) -> list[LiveGraph]:
        """Graphs whose backward pass has not run, in the order of their forward passes."""
        found = [graph for ref in self._live if (graph := ref()) is not None and graph.waits]
        self._live = [weakref.ref(graph) for graph in found]
        return found

    def _passes(self, flat: Sequence[ForwardInput]) -> list[PackedPass]:
        trained = self._slots.checkpoints if torch.is_grad_enabled() else []
        return by_slot(flat, [self._slots.of(each) for each in flat], trained)

    def _cost(self, each: ForwardInput) -> int:
        gradient = torch.is_grad_enabled() and each.has_gradient and self._slots.of(each) in self._slots.checkpoints
        return self._estimate.of(each, gradient=gradient)

    def _available(self) -> int:
        """Memory for a pass on the rank that has least; predictions become those of the rank that measured most. Collective."""
        live = sum(graph.nbytes for graph in self._graphs())
        left = free_bytes(self._engine.device) if self._limit is None else self._limit - live
        told = self._shared([left, self._estimate.to_plain()])
        self._estimate.raise_to([each[1] for each in told])
        return min(int(each[0]) for each in told)

    def _next_micro_batch(
        self, inputs: Sequence[ForwardInputs], items: Sequence[Sequence[ForwardInput]], first: int
    ) -> MicroBatch:
        available = self._available()
        rank, world = self.data_share
        costs = tuple(sum(self._cost(each) for each in item) for item in items[first:])
        width = next(iter(planned_windows(costs, world, available)), 0)
        if not width:
            raise self._too_large(f"item {first}", costs[0], available)
        indices = part_of(first, width, rank, world)
        flat = [each for index in indices for each in items[index]]
        shares = [part_of(first, width, each, world) for each in range(world)]
        passes = [self._passes([each for index in share for each in items[index]]) for share in shares]
        found, measured = self._compute(passes[rank], flat, _most(passes))
        outputs = iter(found)
        mine = [inputs[index] for index in indices]
        tokens, cost = sum(len(each.tokens) for each in flat), window_cost(costs, 0, width, world)
        stats = MicroBatchStats(first, width, tokens, cost, available, measured)
        return MicroBatch(mine, [shaped_like(each, outputs) for each in mine], list(indices), stats)

    def _compute(
        self, passes: Sequence[PackedPass], flat: Sequence[ForwardInput], counts: tuple[int, int]
    ) -> tuple[list[ForwardOutput], int]:
        """Run this rank's passes, and as many more as others make; returns outputs in the order of `flat`, and bytes."""
        mine = [each for each in passes if each.gradient]
        others = [each for each in passes if not each.gradient]
        trained = self._slots.checkpoints
        mine += [PackedPass(trained[0], (), gradient=True)] * (counts[0] - len(mine)) if trained else []
        others += [PackedPass("", (), gradient=False)] * (counts[1] - len(others))
        found: dict[int, ForwardOutput] = {}
        total = 0
        for each in (*mine, *others):
            outputs, measured = self._run(each)
            total += measured
            found |= {id(asked): output for asked, output in zip(each.inputs, outputs, strict=True)}
        return [found[id(each)] for each in flat], total

    def _run(self, packed: PackedPass) -> tuple[list[ForwardOutput], int]:
        """Run one pass; returns its outputs, and the bytes that it took."""
        query = packed.query(micro := packed.packed())
        meter = Meter(self._engine.device)
        measured = self._estimate.wants_measuring(packed.tokens, gradient=packed.gradient)
        with torch.set_grad_enabled(packed.gradient), meter.forward(measured=measured):
            found = self._engine.run_pass(micro, query, packed.slot)

        def learn() -> None:
            self._estimate.learn(packed.inputs, meter.bytes, gradient=packed.gradient)

        def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
            with meter.backward():
                self._engine.run_backward(outputs, gradients, packed.slot)
            learn()
            if packed.inputs:
                self._with_gradient.add(packed.slot)

        if packed.gradient:
            found = self._handed_out(packed, found, meter.bytes, backward)
        learn()
        return packed.split(found, query) if packed.inputs else [], meter.bytes

    def _handed_out(
        self,
        packed: PackedPass,
        found: dict[str, torch.Tensor],
        nbytes: int,
        backward: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None],
    ) -> dict[str, torch.Tensor]:
        """`found`, cut off from its graph, see `LiveGraph`."""
        graphed = {name: tensor for name, tensor in found.items() if tensor.requires_grad}
        predicted = sum(self._estimate.of(each, gradient=True) for each in packed.inputs)
        graph = LiveGraph(packed.slot, list(graphed.values()), nbytes or predicted, backward)
        self._live.append(weakref.ref(graph))
        if not packed.inputs:
            self._idle.append(graph)
        return {**found, **dict(zip(graphed, graph.handed_out(), strict=True))}

    def _too_large(self, named: str, predicted: int, available: int) -> ForwardMemoryError:
        return ForwardMemoryError(
            f"{named} would take {predicted} bytes in a forward pass, and {available} are available.",
            part=PART,
            hint="Give shorter or fewer inputs, leave out logits, or drop outputs that still wait for backward.",
        )


def _most(passes: Sequence[Sequence[PackedPass]]) -> tuple[int, int]:
    """The most passes with and without gradient that any rank makes, from those of every rank."""
    with_gradient = [sum(each.gradient for each in of_rank) for of_rank in passes]
    return max(with_gradient), max(len(of_rank) - some for of_rank, some in zip(passes, with_gradient, strict=True))
