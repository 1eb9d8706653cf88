"""A trainer rank of the engines' tests.

    python engine_worker.py PIPE RANK WORLD PORT

It answers commands: ``{"do": name, ...arguments}`` with ``{"ok": value}``, or with ``{"error": type, "message": text}``.
The real engine runs here: nothing is replaced.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from context_commands import ContextCommands
from engine_batches import LOSSES, Sample, batch_of, make_batch, make_samples
from lora_commands import LoraCommands
from rank_commands import RankCommands, moment_slices
from torch.distributed.tensor import DTensor
from waiting import HANG_S

from weightlane.ckpt_engines import as_weightlane_error
from weightlane.sync import Placement
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.data.batch import LossDenominators
from weightlane.trainer.data.sequences import MicroBatch
from weightlane.trainer.dispatch.rank_worker import RankWorker
from weightlane.trainer.engines.hf import export, rank_rounds
from weightlane.trainer.engines.optimizers import adamw
from weightlane.trainer.engines.rank_collectives import join_ranks
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.objectives.loss import LossOutput, ModelOutputs
from weightlane.trainer.objectives.supervised import sft


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()


def _rounded(moment: torch.Tensor, optimizer: str, *, signed: bool) -> torch.Tensor:
    """Return a moment as it is after `optimizer` has held it."""
    if optimizer == "adamw_bf16":
        return moment.bfloat16().float()
    if optimizer != "adamw_8bit" or not moment.numel() or moment.numel() % 256:
        return moment
    from torchao.optim.subclass_8bit import OptimState8bit

    held = OptimState8bit.zeros(moment.shape, signed)
    held.copy_(moment)
    return held.dequantize()


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().view(torch.int32)


class Worker(LoraCommands, RankCommands, ContextCommands):
    """The commands."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self._rank, self._world, self._port = rank, world, port
        self._engine: Any = None
        self._beside: Any = None
        self._rank_worker: RankWorker | None = None

    def join(self) -> None:
        """Join the process group that all engines of this process share, unless it has been joined."""
        join_ranks(self._rank, self._world, ("127.0.0.1", self._port), torch.device("cpu"), HANG_S)

    def setup(self, model: str, trainer: dict[str, Any]) -> None:
        self.close()
        self.join()
        config = TrainerConfig(device="cpu", ranks=self._world, collective_timeout_s=HANG_S, **trainer)
        self._engine = training_engine_class(config.engine)(config, self._rank, self._world, ("", 0))
        if config.optimizer == "adamw_8bit":  # .ci/setup-env puts what it needs where transformers does not find it
            sys.path.append(f"{sys.prefix}/torchao")
        self._engine.setup(Path(model), seed=0)
        sys.path[:] = [path for path in sys.path if not path.endswith("torchao")]

    def swap(self) -> None:
        """Exchange the engine with the one beside it, if there are any. The one beside it stays open."""
        self._engine, self._beside = self._beside, self._engine

    def lose_first_connection(self) -> None:
        """Make the ranks' first try to connect go wrong as it does in gloo now and then: rank 0 waits for rank 1."""
        from gloo_faults import publish_and_never_call

        from weightlane.ckpt_engines.engines.torch_distributed import gloo_connect

        gloo_connect._LONGEST_TRY_S = 2.0  # it would be a minute
        gloo_connect._GRACE_S = HANG_S  # however busy the machine is
        if self._rank == 0:
            return
        connect = dist.init_process_group

        def lose(*_: Any, store: dist.Store, rank: int, timeout: timedelta, **__: Any) -> None:
            dist.init_process_group = connect
            first_group = dist.PrefixStore("0//cpu/", store)  # where torch has it
            publish_and_never_call(first_group, rank, timeout)

        dist.init_process_group = lose

    def train(self, first: int, count: int, rows: int = 6, loss: str = "policy") -> list[dict[str, float]]:
        """Make `count` steps on the batches from `first` on; what is reported of each."""
        reports = []
        for step in range(first, first + count):
            metrics = self._engine.forward_backward(make_batch(step, rows), LOSSES[loss]).metrics
            reports.append({**metrics, "norm": self._engine.optim_step(lambda names: None)})
        return reports

    def gradient(
        self, rows: int, calls: list[list[int]], loss: str, experts: int = 0
    ) -> tuple[float, list[tuple[Any, ...]]]:
        """The loss, and slices of the gradient, of `rows` samples that are split into `calls`; with `experts`, see `Sample`.

        AdamW's first moment is the gradient itself where its decay rate is 0.
        """
        samples = make_samples(0, rows)
        denominators = LossDenominators.of(batch_of(samples))
        results = [
            self._engine.forward_backward(batch_of((samples[row] for row in call), experts), LOSSES[loss], denominators)
            for call in calls
        ]
        self._engine.optim_step(lambda names: None)
        slices = [(name, starts, data) for name, _, starts, data in moment_slices(self._engine, "exp_avg")]
        return sum(result.metrics["loss"] for result in results), slices

    def forward(
        self,
        rows: int = 6,
        outputs: tuple[Any, ...] = ("logprobs",),
        top_k: int = 0,
        adapter: str | None = None,
        experts: int = 0,
    ) -> dict[int, dict[str, Any]]:
        """Outputs of a batch by sequence, without gradient."""
        found = self._engine.forward(batch_of(make_samples(0, rows), experts), outputs, top_k, adapter=adapter)
        return {index: {name: each.numpy() for name, each in named.items()} for index, named in found.items()}

    def reached_experts(self, batch: bytes) -> list[tuple[Any, ...]]:
        """Id and experts of each token of `batch`, pickled, that the model reads. The engine is of no use afterwards."""
        model, read, reached = self._engine._model, [], []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].flatten()))
        for layer in model.model.layers:
            layer.mlp.experts.register_forward_pre_hook(lambda _, args: reached.append(args[1]))
        self._engine.forward(pickle.loads(batch))
        (tokens,), rows = read, torch.stack(reached, 1)
        return [(token, *row) for token, row in zip(tokens.tolist(), rows.flatten(1).tolist(), strict=True)]

    def leave_forward(self) -> str:
        """A forward pass that fails in the first layer's MLP."""

        def stop(*_: object) -> None:
            raise ValueError("the pass ended here.")

        modules = dict(self._engine._chunks[0].named_modules())
        (mlp,) = [each for name, each in modules.items() if name.endswith(".layers.0.mlp")]
        try:
            with mlp.register_forward_pre_hook(stop):
                self._engine.forward(make_batch(0))
        except ValueError as error:
            return str(error)
        return ""

    def train_with_dropout(self, mode: bool) -> dict[str, Any]:
        """Two losses of the same batch and parameters, its log-probabilities, and how many of its tokens were computed."""
        self._engine.train(mode)
        batch = make_batch(0)
        both = LossDenominators.of(batch, batch)
        passes = [self._engine.forward_backward(batch, LOSSES["sft"], both).metrics for _ in range(2)]
        logprobs = {index: found["logprobs"].numpy() for index, found in self._engine.forward(batch).items()}
        self._engine.optim_step(lambda names: None)
        tokens = [passes[0].get(name) for name in ("packed_tokens", "read_tokens")]
        return {"losses": [each["loss"] for each in passes], "logprobs": logprobs, "tokens": tokens}

    def fail(self) -> str:
        """A forward_backward that fails, by its loss of the second micro-batch, after one that did not."""
        batch, seen = make_batch(0), []
        denominators = LossDenominators.of(batch, batch)

        def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
            seen.append(micro)
            if len(seen) > 1:
                raise ValueError("the loss failed.")
            return sft(outputs, micro)

        self._engine.forward_backward(batch, sft, denominators)
        try:
            self._engine.forward_backward(batch, loss, denominators)
        except ValueError as error:
            return str(error)
        return ""

    def run_code(self, code: str) -> dict[str, float]:
        """Run a block of the documentation, with the engine and some pairs of prompt and answer; the metrics of its result."""
        names: dict[str, Any] = {"engine": self._engine, "pairs": [([1, 2], [3]), ([4], [5, 6])]}
        exec(code, names)
        return dict(names["result"].metrics)

    def shards(self, wire_dtype: str = "float32") -> list[tuple[Any, ...]]:
        """Return the shards that this rank publishes: name, shape, dtype, starts and values of each."""
        shards = self._engine.local_shards(getattr(torch, wire_dtype))
        return [
            (s.spec.name, s.spec.shape, str(s.spec.dtype), s.starts, s.data.detach().float().numpy()) for s in shards
        ]

    def placement(self, wire_dtype: str) -> list[Any]:
        """Return this rank's placement as plain data."""
        return Placement.of_shards(self._engine.local_shards(getattr(torch, wire_dtype))).to_plain()

    def forward_weights(self) -> list[tuple[Any, ...]]:
        """The bfloat16 parameters that a megatron engine's forward pass uses, as slices of checkpoint tensors."""
        from weightlane.trainer.engines.megatron.weights import parameter_pieces

        pieces = parameter_pieces(self._engine._chunks, self._engine._facts.shape, self._engine._coordinates)
        slices = [(at.name, at.starts, each[at.box.index]) for each, all_of in pieces.items() for at in all_of]
        assert {data.dtype for _, _, data in slices} == {torch.bfloat16}
        return [(name, starts, data.detach().float().numpy()) for name, starts, data in slices]

    def bucket_groups(self) -> int:
        """Into how many sums a megatron engine cuts the gradients of its first chunk."""
        return len(self._engine._chunks[0].bucket_groups)

    def save(self, directory: str) -> int:
        self._engine.save(Path(directory))
        return self._engine.step

    def load(self, directory: str, *, optimizer: bool = True) -> int:
        """Load what is in `directory`, in which RANK stands for this rank."""
        self._engine.load(Path(str(directory).replace("RANK", str(self._rank))), optimizer=optimizer)
        return self._engine.step

    def export(
        self, directory: str, dtype: str = "float32", host: str = "", record: str = "", dies_in: int = -1
    ) -> None:
        """Export to `directory`, on a machine called `host`, with all allocations on `record`; may die in a round.

        RANK stands for this rank.
        """
        import memray

        write, rounds = export._write_round, itertools.count()

        def write_round(*arguments: Any) -> None:
            if next(rounds) == dies_in:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)

        directory, host, record = (str(each).replace("RANK", str(self._rank)) for each in (directory, host, record))
        round_bytes, file_bytes = (1 << 20, 1 << 30) if record else (4096, 16384)  # many rounds for a tiny model
        sizes = patch.multiple(export, ROUND_BYTES=round_bytes, FILE_BYTES=file_bytes, _write_round=write_round)
        hosts = patch.object(export.socket, "gethostname", lambda: host or "localhost")
        with (
            sizes,
            hosts,
            patch.object(rank_rounds, "_GRACE_S", 0.5),
            memray.Tracker(record) if record else nullcontext(),
        ):
            self._engine.export_hf(Path(directory), getattr(torch, dtype))

    def addresses(self) -> list[int]:
        """Where the storage behind each shard is."""
        return [shard.data.untyped_storage().data_ptr() for shard in self._engine.local_shards(torch.float32)]

    def fence(self, fail_at: int = -1, *, overflow: bool = False) -> dict[str, Any]:
        """One step that notes, at every call of the fence, what it names and what has changed by then.

        With `fail_at`, that call raises; with `overflow`, an advantage is so large that no gradient can hold it.
        """
        from weightlane.trainer.conformance.processes.rank_process import noted_step  # imports pytest

        batch = batch_of([Sample((1,), (2, 3), (-4.0, -4.0), 3e38)] * 4) if overflow else make_batch(0)
        engine = self._engine
        published = [shard.spec.name for shard in engine.local_shards(torch.float32) if shard.data.numel()]
        engine.forward_backward(batch, LOSSES["policy"])
        return {**noted_step(engine, fail_at), "published": list(dict.fromkeys(published))}

    def train_beside_one_whole_step(self, count: int) -> list[list[str]]:
        """Train, and step a copy of the parameters by one torch optimizer over all of them with the same, clipped gradients.

        What the engine holds in less than float32 is rounded so in the copy after each step. Returns, per step, the parameters
        that differ in any bit from the copy's.
        """
        engine, config = self._engine, self._engine.config
        adamw._STEPPED = 1000  # so that a part is stepped in several calls of the kernel
        live = self._stepped()
        muon = config.optimizer == "muon"
        twins = {name: _whole(each) if muon else each.detach().clone() for name, each in live.items()}
        matrices = [
            twins[name].requires_grad_() for name in twins if muon and ".layers." in name and twins[name].ndim == 2
        ]
        others = [twin.requires_grad_() for twin in twins.values() if not twin.requires_grad]
        decay = {"lr": 0.0, "weight_decay": config.weight_decay}
        whole: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=config.betas, fused=True, **decay)]
        if muon:
            whole += [torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **decay)]

        def copy_gradients(_names: Collection[str]) -> None:
            for name, parameter in live.items():
                if twins[name].grad is None:
                    assert parameter.grad is not None
                    twins[name].grad = _whole(parameter.grad) if muon else parameter.grad.clone()

        different = []
        for step in range(count):
            engine.forward_backward(make_batch(step), LOSSES["policy"])
            engine.optim_step(copy_gradients)
            for optimizer in whole:
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * min(1.0, (step + 1) / max(1, config.lr_warmup_steps))
                optimizer.step()
                optimizer.zero_grad()
            for state in whole[0].state.values() if not muon else ():
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = state[key].to_local() if isinstance(state[key], DTensor) else state[key]
                    moment.copy_(_rounded(moment, config.optimizer, signed=key == "exp_avg"))
            now = {name: _whole(each) if muon else each for name, each in live.items()}
            bits = [(name, _bits(now[name]), _bits(twins[name])) for name in live]
            different.append([name for name, left, right in bits if not torch.equal(left, right)])
        return different

    def forward_equal(self) -> list[Any]:
        """Log-probabilities of a sequence, beside an equal one and by itself; nothing on ranks that do not answer."""
        sample = make_samples(0)[1]
        passes = [self._engine.forward(batch_of([sample] * count)) for count in (2, 1)]
        return [each["logprobs"].numpy() for found in passes for each in found.values()]

    def _stepped(self) -> dict[str, torch.Tensor]:
        """What the engine's optimizer steps on this rank: parameters, or the master weights of megatron-core."""
        if self._engine.config.engine == "fsdp2":
            return dict(self._engine._model.named_parameters())
        chained = getattr(self._engine._optimizer, "chained_optimizers", [self._engine._optimizer])
        groups = [group for each in chained if each.optimizer for group in each.optimizer.param_groups]
        return {str(number): each for number, each in enumerate(each for group in groups for each in group["params"])}

    def group_timeouts(self) -> list[float]:
        """Seconds until a collective fails, in the group of all ranks and in those of an fsdp2 engine over tensor parallelism."""
        mesh = self._engine._mesh
        groups: list[Any] = [dist.group.WORLD, mesh.data.get_group(), mesh.tensor.get_group()]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]

    def rank_worker(self, method: str, args: bytes) -> bytes:
        """Call a method of a `RankWorker`; of a new one after ``close``.

        Returns what it returned or raised, pickled, as it travels over Ray. See `TeamRanks`.
        """
        if self._rank_worker is None:
            self.close()
            self.join()
            self._rank_worker = RankWorker(self._rank, self._world)
        try:
            answer = getattr(self._rank_worker, method)(*pickle.loads(args))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer = as_weightlane_error(error, f"rank {self._rank}")
        if method == "close":
            self._rank_worker = None
        return pickle.dumps(answer)

    def close(self) -> None:
        """Close the engine. Its process groups stay: torch keeps operations for meshes that equal one of an earlier engine."""
        for open_one in filter(None, (self._engine, self._api)):
            open_one.close()
        self._engine = self._api = self._kept = None


def serve(worker: Any, line: int) -> None:
    """Answer commands by the methods of `worker` until the other side closes its end of the pipe."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    commands = Connection(line)
    while True:
        try:
            command = commands.recv()
        except EOFError:
            os._exit(0)  # the team is no longer needed, whatever state its engines are in
        try:
            answer = {"ok": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - the test judges it
            answer = {"error": type(error).__name__, "message": str(error)}
        commands.send(answer)


if __name__ == "__main__":
    line, rank, world, port = map(int, sys.argv[1:])
    serve(Worker(rank, world, port), line)
