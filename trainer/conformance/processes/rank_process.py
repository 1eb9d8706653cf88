"""One rank of a training engine in a process of its own, and the operations that checks request from it.

A request is ``{"op": name, ...arguments}``. Its answer is ``{"ok": result, "s": seconds}`` or ``{"error": ..., "s": seconds}``.
Tensors go to safetensors files, whose names the check chooses. The engine is used by its public methods only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import resource
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.ckpt_engines.conformance.processes import leftovers
from weightlane.ckpt_engines.conformance.processes.errors_as_json import error_to_json
from weightlane.ckpt_engines.conformance.processes.resolve import class_at, is_place
from weightlane.ckpt_engines.engines.torch_distributed.process_group import reserve_port
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.sync import Placement, dtype_of

from ...config import TrainerConfig
from ...engines.contract import SequenceOutputs, StatePart, TrainingEngine
from ...engines.optimizers.settings import AdamParams
from ...engines.registry import training_engine_class
from ...objectives.loss import OutputName
from ..batches import BatchSpec, three_terms

HOST = "127.0.0.1"
FENCE_FAILED = "the fence failed."
"""Message of the error with which the fence of a check fails."""


class RankProcess:
    """The operations of the process. It has at most one open engine."""

    def __init__(self) -> None:
        self._engine: TrainingEngine | None = None
        self._reserved: Any = None

    @property
    def engine(self) -> TrainingEngine:
        """The engine that was set up last."""
        assert self._engine is not None, "no engine"
        return self._engine

    def reserve(self) -> int:
        """Reserve the port of the ranks' rendezvous until `setup` of this rank listens there."""
        self._reserved = reserve_port(HOST)
        return int(self._reserved.getsockname()[1])

    def setup(self, engine: str, trainer: dict[str, Any], rank: int, port: int, model: str, seed: int = 0) -> None:
        """Close the current engine, if there is one, and set up a new one."""
        self.close()
        config = TrainerConfig.model_validate(trainer)
        self._engine = engine_class(engine)(config, rank, config.ranks, (HOST, port))
        try:
            self._engine.setup(Path(model), seed)
        finally:
            if self._reserved is not None:
                self._reserved.close()
                self._reserved = None

    def refusal(self, engine: str, trainer: dict[str, Any], model: str) -> str:
        """Return why the engine's ``check`` refuses a model; empty if it does not."""
        try:
            engine_class(engine).check(TrainerConfig.model_validate(trainer), Path(model))
        except ConfigError as refused:
            return refused.message
        return ""

    def outline(self, engine: str, trainer: dict[str, Any], rank: int, model: str, wire_dtype: str) -> list[Any]:
        """Return the placement of a rank that does not run. The process must not be used afterwards."""
        config = TrainerConfig.model_validate(trainer)
        dist.init_process_group("fake", rank=rank, world_size=config.ranks)
        self._engine = engine_class(engine)(config, rank, config.ranks, ("", 0))
        self._engine.outline(Path(model))
        return self.placement(wire_dtype)

    def placement(self, wire_dtype: str) -> list[Any]:
        """Return which slices of which tensors this rank publishes, as plain data."""
        return list(Placement.of_shards(self.engine.local_shards(dtype_of(wire_dtype))).to_plain())

    def forward(self, batch: dict[str, Any], outputs: list[OutputName], file: str, top_k: int = 0) -> list[list[int]]:
        """Compute outputs for each call of a mini-batch, as `_write_outputs` writes them."""
        found = [self.engine.forward(each, outputs, top_k) for each in BatchSpec.from_plain(batch).batches()]
        return _write_outputs(found, file)

    def forward_backward(
        self,
        batch: dict[str, Any],
        scale: float = 1.0,
        outputs: list[OutputName] | None = None,
        file: str = "",
        counted: bool = True,
    ) -> dict[str, Any]:
        """Add the gradient of each call of a mini-batch; returns the metrics of each, and as `forward` for `outputs`.

        Unless `counted`, each call is to be a whole mini-batch.
        """
        spec, loss = BatchSpec.from_plain(batch), three_terms(scale)
        # A mini-batch with a wrong token has the same counts as without it.
        counts = spec.denominators() if counted else None
        results = [self.engine.forward_backward(each, loss, counts, outputs or ()) for each in spec.batches()]
        rows = _write_outputs([result.outputs for result in results], file) if file else []
        return {"metrics": [dict(result.metrics) for result in results], "rows": rows}

    def optim_step(self, fail_at: int = -1, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Step, and note at every call of the fence what it names and what has changed by then. Call `fail_at` raises."""
        return noted_step(self.engine, fail_at, None if params is None else AdamParams(**params))

    def zero_grad(self) -> None:
        """Drop the accumulated gradients of a mini-batch."""
        self.engine.zero_grad()

    def shards(self, wire_dtype: str, file: str) -> list[dict[str, Any]]:
        """Write the data of every shard under its number to `file`; returns the shards' other fields."""
        shards = self.engine.local_shards(dtype_of(wire_dtype))
        # A copy each: shards may be views of one storage.
        save_file(
            {
                str(number): shard.data.detach().cpu().clone(memory_format=torch.contiguous_format)
                for number, shard in enumerate(shards)
            },
            file,
        )
        return [
            {
                "name": shard.spec.name,
                "shape": list(shard.spec.shape),
                "dtype": str(shard.spec.dtype).removeprefix("torch."),
                "starts": list(shard.starts),
                "address": shard.data.untyped_storage().data_ptr() if shard.data.numel() else 0,
            }
            for shard in shards
        ]

    def steps(self) -> int:
        """Return the engine's step count."""
        return self.engine.step

    def draw(self) -> list[float]:
        """Advance the random state, and return the drawn numbers."""
        return list(torch.rand(3).tolist())

    def save(self, directory: str) -> None:
        """Save the training state."""
        self.engine.save(Path(directory))

    def load(self, directory: str, optimizer: bool = True) -> None:
        """Load a training state, or a model."""
        self.engine.load(Path(directory), optimizer=optimizer)

    def export_hf(self, directory: str, dtype: str = "float32") -> None:
        """Export the model."""
        self.engine.export_hf(Path(directory), dtype_of(dtype))

    def export_saved(self, engine: str, state: str, model: str, directory: str, dtype: str) -> None:
        """Export a saved state with only an engine's class, no engine."""
        engine_class(engine).export_saved(Path(state), Path(model), Path(directory), dtype_of(dtype))

    def offload(self, parts: list[StatePart]) -> None:
        """Offload parts of the state."""
        self.engine.offload(parts)

    def onload(self, parts: list[StatePart]) -> None:
        """Onload parts of the state."""
        self.engine.onload(parts)

    def offloaded(self) -> list[str]:
        """Return the offloaded parts of the state, sorted."""
        return sorted(self.engine.offloaded)

    def limit_files(self, nbytes: int | None) -> None:
        """Make writes beyond `nbytes` bytes of a file fail; None lifts the limit."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails as on a full disk
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if nbytes is None else nbytes, hard))

    def close(self) -> None:
        """Close the engine twice, since the second close must change nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            engine.close()

    def make_and_close(self, engine: str, trainer: dict[str, Any], rank: int) -> None:
        """Close an engine that was never set up."""
        config = TrainerConfig.model_validate(trainer)
        made = engine_class(engine)(config, rank, config.ranks, (HOST, 1))
        made.close()

    def resources(self) -> dict[str, int]:
        """Return counts of everything that could leak from this process."""
        return leftovers.of_this_process()


def engine_class(name: str) -> type[TrainingEngine]:
    """Return the engine class of an installed training engine, or of ``module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ConfigError: There is no such engine, or it cannot be used.
        RegistryError: The class cannot be loaded, or is not a complete `TrainingEngine`.
    """
    return class_at(name, TrainingEngine) if is_place(name) else training_engine_class(name)  # type: ignore[type-abstract]


def noted_step(engine: TrainingEngine, fail_at: int = -1, params: AdamParams | None = None) -> dict[str, Any]:
    """Step, and note at every call of the fence what it names and what has changed by then. Call `fail_at` raises."""
    live = [(shard.spec.name, shard.data) for shard in engine.local_shards(torch.float32) if shard.data.numel()]
    before = [data.clone() for _, data in live]

    def changed() -> list[str]:
        pairs = zip(live, before, strict=True)
        return list(dict.fromkeys(name for (name, data), old in pairs if not torch.equal(data, old)))

    calls: list[dict[str, list[str]]] = []

    def before_change(names: Collection[str]) -> None:
        calls.append({"named": list(names), "changed": changed()})
        if len(calls) - 1 == fail_at:
            raise WeightlaneError(FENCE_FAILED, part="conformance")

    error, norm = "", 0.0
    try:
        norm = engine.optim_step(before_change, params=params)
    except WeightlaneError as cause:
        error = f"{type(cause).__name__}: {cause.message}"
    return {"norm": norm, "error": error, "calls": calls, "changed": changed(), "step": engine.step}


def _write_outputs(found: Sequence[Mapping[int, SequenceOutputs]], file: str) -> list[list[int]]:
    """Write the outputs of each call to `file`, as ``call/index/name``; returns the indices of each."""
    save_file(
        {
            f"{call}/{index}/{name}": tensor.contiguous()
            for call, outputs in enumerate(found)
            for index, named in outputs.items()
            for name, tensor in named.items()
        },
        file,
    )
    return [list(outputs) for outputs in found]


def serve(requests: JsonSocket) -> None:
    """Answer requests until the other end of the socket closes."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    rank = RankProcess()
    while (request := requests.receive()) is not None:
        started = time.monotonic()
        request.pop("deadline_s", None)  # the requesting process enforces it
        operation: Callable[..., Any] = getattr(rank, request.pop("op"))
        answer: dict[str, Any]
        try:
            answer = {"ok": operation(**request)}
        except Exception as error:  # noqa: BLE001 - the check raises it
            answer = {"error": error_to_json(error)}
        requests.send({**answer, "s": time.monotonic() - started})
    with contextlib.suppress(Exception):
        rank.close()
