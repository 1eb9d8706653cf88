"""`TrainerRank`: one rank of a user-written training program, with adapters in slots."""

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
from .inputs import PART, ForwardInput, ForwardInputs, check_tokens, digest, flattened, refuse_different
from .live_graphs import LiveGraph
from .memory import MemoryEstimate, Meter, free_bytes
from .open_engine import OpenEngine
from .outputs import ForwardOutput, ForwardOutputs, MicroBatch, MicroBatchStats, shaped_like
from .packed_pass import PackedPass, by_slot
from .slots import SlotKind, Slots, plain
from .windows import part_of, widest_window, window_cost


class TrainerRank(Slots):
    """One rank of a program that torchrun, or anything that initialised torch.distributed, started on every rank.

    The model's own weights are frozen. Slots add low-rank adapters to them: *LoRAs*, which are not trained, and *checkpoints*,
    which have an optimizer. Every method but `close`, `set_*`, `push_*` and `pop_*` is collective: all ranks call it, in the same
    order. The ranks of a tensor parallel group pass the same inputs.

    Args:
        model_dir: The Hugging Face directory of the model.
        config: Engine, layout and precision; optimizer and ranks are not read. The engine must have adapters: fsdp2, or
            megatron without pipeline parallelism.
        memory_limit_bytes: Memory that forward passes and their graphs may take on this rank; None for all free memory.
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
            self.engine.layer_widths,
            self.engine.bytes_per_activation,
            self.engine.vocabulary,
            self._open.hidden,
        )
        self._live: list[weakref.ref[LiveGraph]] = []
        self._idle: list[LiveGraph] = []
        """Graphs of passes without inputs of this rank. This list keeps them alive, since the program has no outputs of them."""
        self._with_gradient: set[str] = set()
        """Checkpoints for which this rank has a gradient."""

    @property
    def engine(self) -> AdaptedEngine:
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
        """Load a trainable adapter, which replaces one of that name. Collective.

        Args:
            name: Letters, digits, dots, dashes and underscores.
            source: A directory that PEFT or `save` wrote; the optimizer that `save` wrote there is resumed. None for a fresh
                adapter, whose B is 0.
            config: Rank, scale, layers and seed of a fresh one.

        Raises:
            ConfigError: `source` holds no adapter for this model, or one that contradicts `config`, or a LoRA has that name.
            ProtocolError: A forward pass of it still waits for its backward pass.
        """
        self._load("checkpoint", name, None if source is None else Path(source), config)

    def save(self, name: str, directory: str | Path) -> None:
        """Write a slot in PEFT's format, a checkpoint with its optimizer. `directory` must not exist. Collective."""
        self._slot(self._kinds.get(name, "checkpoint"), name)
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
        with_gradient = sum(each.gradient for each in passes)
        told = self._shared([with_gradient, len(passes) - with_gradient, sum(self._cost(each) for each in flat)])
        most = [max(int(each[number]) for each in told) for number in range(3)]
        if most[2] > available:
            raise self._too_large("the inputs of a rank", most[2], available)
        found = self._compute(passes, flat, (most[0], most[1]))[0]
        return shaped_like(inputs, iter(found))

    def forward_micro_batches(self, inputs: Sequence[ForwardInputs]) -> Iterator[MicroBatch]:
        """Compute inputs that are the same on every rank, in the widest micro-batches that fit into memory. Collective.

        Items are divided among the data parallel ranks, and never split: nest inputs that belong together. Call `backward`
        before requesting the next micro-batch; otherwise the outputs' graphs stay in memory.

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

        ``loss.backward()`` does the same if the losses of all ranks depend on the same number of forward passes. This method also
        works if a rank had no inputs, or if its loss does not depend on all of its passes.

        Args:
            loss: A scalar; a number, or a tensor without gradient, on a rank that contributes nothing.

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
        self.engine.zero_grad()
        self._with_gradient.clear()

    def optim_step(
        self, params: AdamParams, scale_grads: float = 1.0, checkpoints: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Take one step of AdamW with the gradients, summed over the ranks, and drop them. Collective.

        Args:
            params: AdamW's settings.
            scale_grads: Factor for the gradients, applied first: 1 / n, if losses were sums over n tokens of all ranks.
            checkpoints: The checkpoints to step; None for all that have a gradient on any rank.

        Raises:
            GradientError: A gradient is not finite. No checkpoint has changed, and the gradients of all of them are dropped.
            ProtocolError: A checkpoint has no gradient, or one of its forward passes waits for backward; nothing has changed.
            ConfigError: There is no such checkpoint.

        Returns:
            The L2 norm of each checkpoint's gradient, scaled and before clipping.
        """
        state = self._shared([sorted(self._with_gradient), sorted({each.slot for each in self._graphs()})])
        known = {name for gradients, _ in state for name in gradients}
        names = [name for name in self._checkpoints if name in known]
        if checkpoints is not None:
            names = [self._slot("checkpoint", name) for name in checkpoints]
        self._refuse_live(names, [name for _, live in state for name in live])
        if not names or not known.issuperset(names):
            of = f" of {', '.join(sorted({*names} - known))}" if names else ""
            raise ProtocolError(f"there is no gradient{of}.", part=PART, hint="Call backward before optim_step.")
        self._with_gradient.difference_update(names)
        return self.engine.step_adapters(names, params, scale_grads)

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._idle.clear()
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
        live = self._shared(sorted({each.slot for each in self._graphs()}))
        self._refuse_live([name], [each for names in live for each in names])
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
        self._with_gradient.discard(name)

    def _require_alike(self, flat: Sequence[ForwardInput], *, by_share: bool) -> None:
        """Raise unless all ranks, or all of a data parallel share, were given the same inputs. Collective."""
        refuse_different(self._shared([self.data_share[0] if by_share else 0, digest(flat, self._slot_of)]))

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
        trained = self._checkpoints if torch.is_grad_enabled() else []
        return by_slot(flat, [self._slot_of(each) for each in flat], trained)

    def _cost(self, each: ForwardInput) -> int:
        gradient = torch.is_grad_enabled() and each.has_gradient and self._slot_of(each) in self._checkpoints
        return self._estimate.of(each, gradient=gradient)

    def _available(self) -> int:
        """Bytes for inputs on the rank that has least. Adopts the highest memory estimate of all ranks. Collective."""
        live = sum(graph.nbytes for graph in self._graphs())
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
        width = widest_window(costs, world, available)
        if not width:
            raise self._too_large(f"item {first}", costs[0], available)
        shares = [[first + index for index in part_of(width, each, world)] for each in range(world)]
        flats = [[each for index in share for each in items[index]] for share in shares]
        passes, indices, flat = [self._passes(each) for each in flats], shares[rank], flats[rank]
        found, measured = self._compute(passes[rank], flat, _most(passes))
        outputs = iter(found)
        mine = [inputs[index] for index in indices]
        tokens, cost = sum(len(each.tokens) for each in flat), window_cost(costs, width, world)
        stats = MicroBatchStats(first, width, tokens, cost, available, measured)
        return MicroBatch(mine, [shaped_like(each, outputs) for each in mine], indices, stats)

    def _compute(
        self, passes: Sequence[PackedPass], flat: Sequence[ForwardInput], counts: tuple[int, int]
    ) -> tuple[list[ForwardOutput], int]:
        """Run this rank's passes, and empty ones up to `counts`. Returns outputs in the order of `flat`, and measured bytes."""
        mine = [each for each in passes if each.gradient]
        others = [each for each in passes if not each.gradient]
        trained = self._checkpoints
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
        """Run one pass. Returns its outputs, and the bytes that it took."""
        query = packed.query(micro := packed.packed())
        meter, computed = Meter(self.engine.device), self.engine.computed_tokens(micro)
        measured = self._estimate.wants_measuring(computed, gradient=packed.gradient)
        with torch.set_grad_enabled(packed.gradient), meter.forward(measured=measured):
            found = self.engine.run_pass(micro, query, packed.slot)

        def learn() -> None:
            self._estimate.learn(packed.inputs, meter.bytes, gradient=packed.gradient, computed=computed)

        def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
            with meter.backward():
                self.engine.run_backward(outputs, gradients, packed.slot)
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
        """Detach the outputs `found` from their graph, see `LiveGraph`."""
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
    """The largest numbers of passes with and without gradient of any rank."""
    with_gradient = [sum(each.gradient for each in of_rank) for of_rank in passes]
    return max(with_gradient), max(len(of_rank) - some for of_rank, some in zip(passes, with_gradient, strict=True))
