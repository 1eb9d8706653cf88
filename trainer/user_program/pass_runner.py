"""`PassRunner`: runs the passes of one rank on its engine, and keeps the graphs whose backward pass has not run."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch

from ..engines.lora.program_engine import ProgramEngine
from .live_graphs import LiveGraph
from .memory import MemoryEstimate, Meter
from .outputs import ForwardOutput
from .packed_pass import PackedPass, output_of


class PassRunner:
    """Runs passes and their backward passes, and learns from their memory."""

    def __init__(self, engine: ProgramEngine, estimate: MemoryEstimate) -> None:
        self._engine, self._estimate = engine, estimate
        self._live: list[weakref.ref[LiveGraph]] = []
        self._passes = 0
        """Passes so far, which all ranks run together."""
        self._idle: list[LiveGraph] = []
        """Graphs of passes without inputs of this rank. This list keeps them alive, since the program has no outputs of them."""
        self.with_gradient: set[str] = set()
        """Slots for which this rank has a gradient."""

    @property
    def graphs(self) -> list[LiveGraph]:
        """Graphs whose backward pass has not run, in the order of their forward passes."""
        found = [graph for ref in self._live if (graph := ref()) is not None and graph.waits]
        self._live = [weakref.ref(graph) for graph in found]
        return found

    def forget_idle(self) -> None:
        """Let go of the graphs that only this object keeps alive."""
        self._idle.clear()

    def backward(self, loss: torch.Tensor | float) -> None:
        """Run the backward passes of all `graphs`, the last first. `loss` depends on outputs of any of them, or of none."""
        graphs = self.graphs
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            # Ranks whose losses depend on different passes would otherwise run these in different orders.
            for graph in graphs:
                graph.held = True
            try:
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            finally:
                for graph in graphs:
                    graph.held = False
        for graph in reversed(graphs):
            if graph.waits:
                graph.backward()
        self.forget_idle()

    def run(self, packed: PackedPass) -> tuple[list[ForwardOutput], int]:
        """Run one pass. Returns its outputs, in the order of its inputs, and the bytes that it took."""
        engine, inputs, parts = self._engine, packed.inputs, packed.packed()
        self._passes += 1
        query, meter = packed.query(parts), Meter(engine.device)
        with torch.set_grad_enabled(packed.gradient):
            tokens = engine.lay_out(parts)
            computed = tokens.tokens * engine.ranks_per_row
            measured = self._estimate.wants_measuring(computed, gradient=packed.gradient)
            with meter.forward(measured=measured):
                found = engine.run_pass(tokens, query)
            pieces = packed.split(found, query) if inputs else []

        def learn() -> None:
            self._estimate.learn(inputs, meter.bytes, gradient=packed.gradient, computed=computed)

        def backward(
            outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], reached: Collection[str]
        ) -> None:
            with meter.backward():
                engine.run_backward(tokens, outputs, gradients)
            learn()
            self.with_gradient.update(reached)

        if packed.gradient:
            names = {name for piece in pieces for name in piece}
            spare = [tensor for name, tensor in found.items() if name not in names and tensor.requires_grad]
            slots = [slot for slot, of_slot in packed.parts for _ in of_slot]
            graphed = [
                (slot, piece, name)
                for slot, piece in zip(slots, pieces, strict=True)
                for name in piece
                if piece[name].requires_grad
            ]
            outputs = [(slot, piece[name]) for slot, piece, name in graphed]
            nbytes = meter.bytes or sum(self._estimate.of(each, gradient=True) for each in inputs)
            together = engine.exchanges_tokens
            key = self._passes if together else packed.kind
            graph = LiveGraph(key, packed.slots, outputs, spare, nbytes, backward, together=together)
            self._live.append(weakref.ref(graph))
            if not inputs:
                self._idle.append(graph)
            for (_, piece, name), output in zip(graphed, graph.handed_out(), strict=True):
                piece[name] = output
        learn()
        return [output_of(each, piece) for each, piece in zip(inputs, pieces, strict=True)], meter.bytes
