"""Commands of `engine_worker` that are about `TrainerRank`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_batches import TEMPERATURE, VOCAB, make_samples
from waiting import HANG_S

from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.user_program import AdamParams, ForwardInput, ForwardOutput, TrainerRank


def moment_slices(engine: Any, key: str) -> list[tuple[Any, ...]]:
    """This rank's slices of a moment of the model's own weights: name, shape, starts and values of each."""
    if engine.config.engine == "megatron":
        from weightlane.trainer.engines.megatron.weights import moments_of

        moments = moments_of(engine._optimizer)
    else:
        moments = engine._optimizer.state
    trained, shapes = engine._trained_slices(moments), engine._shapes
    slices = [(s.name, shapes[s.name], s.box.starts, s.moments[key]) for s in trained if key in s.moments]
    return [(name, shape, starts, data.float().clone().numpy()) for name, shape, starts, data in slices]


def sample_input(sample: Any, **asked: Any) -> ForwardInput:
    """A sample, of whose completion log-probabilities are wanted."""
    before = len(sample.prompt_ids) - 1
    return ForwardInput(
        input_tokens=sample.prompt_ids + sample.completion_ids[:-1],
        target_tokens=[IGNORED] * before + list(sample.completion_ids),
        temperature=TEMPERATURE,
        **asked,
    )


class RankCommands:
    """A part of the worker."""

    _rank: int
    _world: int
    _api: TrainerRank | None = None
    _kept: Any = None
    _used = 0
    close: Callable[[], None]
    join: Callable[[], None]

    def open_rank(
        self, model: str, trainer: dict[str, Any], limit: int | None = None, *, train_base: bool = False
    ) -> tuple[int, int]:
        """Make the `TrainerRank` of this process; returns its data parallel share."""
        self.close()
        self.join()
        config = TrainerConfig(device="cpu", collective_timeout_s=HANG_S, **trainer)
        if config.optimizer == "adamw_8bit":  # .ci/setup-env puts what it needs where transformers does not find it
            sys.path.append(f"{sys.prefix}/torchao")
        self._api = TrainerRank(model, config, memory_limit_bytes=limit, train_base=train_base)
        sys.path[:] = [path for path in sys.path if not path.endswith("torchao")]
        return self._api.data_share

    @property
    def _open_api(self) -> TrainerRank:
        assert self._api is not None
        return self._api

    def load_slot(self, kind: str, name: str, source: str | None = None, **config: Any) -> list[str]:
        if kind == "lora":
            assert source is not None
            self._open_api.load_lora(name, source)
        else:
            self._open_api.load_checkpoint(name, source, LoraConfig(**config) if config else None)
        return list(self._open_api.engine.adapters)

    def save_slot(self, name: str, directory: str) -> None:
        self._open_api.save(name, directory)

    def slot_logprobs(self, slots: list[Any], rows: int, limit: int | None = None) -> dict[Any, Any]:
        """Everything that a forward pass says about each row's completion by each slot, in mixed micro-batches."""
        api, samples = self._open_api, make_samples(0, rows)
        asked = {"top_k": 5, "entropy": True, "logits": True, "hidden_states": True}
        items = [[sample_input(sample, **asked, **each) for each in slots] for sample in samples]
        found = {}
        with torch.no_grad():
            for micro in api.forward_micro_batches(items):
                for row, outputs in zip(micro.indices, micro.outputs, strict=True):
                    for number, output in enumerate(outputs):
                        start = len(samples[row].prompt_ids) - 1
                        found[row, number] = {name: each[start:] for name, each in _plain(output).items()}
        return found

    def base_state(self) -> list[tuple[Any, ...]]:
        """This rank's slices of the model's own weights, and of all their moments."""
        engine = self._open_api.engine
        found = [
            (s.spec.name, s.spec.shape, s.starts, s.data.detach().clone().numpy())
            for s in engine.local_shards(torch.float32)
        ]
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            found += [(f"{name}|{key}", *rest) for name, *rest in moment_slices(engine, key)]
        return found

    def publish_base(self, steps: int) -> list[dict[str, Any]]:
        """Take steps of the model's own weights, and publish each; on rank 0, what a replica serves after each."""
        from hop import Replica, Rollout
        from patience import PATIENT

        from weightlane.sync import CollectivePublisher, SyncConfig

        class Served(Replica):
            """A replica of one rank, which expects the tensors in `specs`."""

            async def connect(self, rendezvous: Any, backend: str, options: Any) -> None:
                self.ranks["rollout-0/0"] = Rollout("rollout-0/0", rendezvous, backend, dict(options), specs=specs)

        shards = self._open_api.engine.local_shards(torch.float32)
        specs = {shard.spec.name: shard.spec for shard in shards}
        replica, served = Served("rollout-0", {"rollout-0/0": None}), []
        config = SyncConfig(**PATIENT, codec="delta", full_every=100)
        with CollectivePublisher(shards, [replica], backend="shm", config=config) as weights:
            for number in range(steps):
                self.slot_gradients({"": [0, 1]}, 2, "at once", before_change=lambda _: weights.fence() and None)
                weights.publish(number)
                weights.wait()
                if self._rank == 0:
                    live = replica.ranks["rollout-0/0"].live
                    served.append({name: tensor.clone().numpy() for name, tensor in live.items()})
        if self._rank == 0:
            replica.ranks["rollout-0/0"].end.close()
        return served

    def slot_gradients(
        self, losses: dict[str, list[int]], rows: int, how: str, *, before_change: Any = None, **params: Any
    ) -> list[Any]:
        """Take a step of checkpoints with gradients of `engine_batches.mixed`, each with that of the rows that it is given.

        Returns the norms, how many items each micro-batch had on this rank, and the loss of each checkpoint on this rank.
        """
        api, samples = self._open_api, make_samples(0, rows)
        items = [
            sample_input(sample, entropy=True, checkpoint=name)
            for row, sample in enumerate(samples)
            for name, own in losses.items()
            if row in own
        ]
        of_item = [(name, row) for row in range(rows) for name, own in losses.items() if row in own]
        counts = {
            name: (sum(len(samples[row].completion_ids) for row in own), len(own)) for name, own in losses.items()
        }
        totals, sizes = dict.fromkeys(losses, 0.0), []
        calls = [[item] for item in range(len(items))] if how == "one by one" else [list(range(len(items)))]
        found = ((call, micro) for call in calls for micro in api.forward_micro_batches([items[each] for each in call]))
        for call, micro in found:
            loss: Any = 0.0
            for (name, row), output in zip(micro.select([of_item[each] for each in call]), micro.outputs, strict=True):
                mine = _mixed(output, samples[row], *counts[name])
                totals[name] += float(mine.detach())
                loss = loss + mine
            if how == "plain backward":
                loss.backward()
            else:
                api.backward(loss)
            sizes.append(len(micro.indices))
        settings = AdamParams(**{"learning_rate": 1e-3, "betas": (0.0, 0.999), "max_grad_norm": 1e9, **params})
        return [api.optim_step(settings, before_change=before_change), sizes, totals]

    def slot_steps(self, name: str, first: int, count: int, *, spoil: bool = False) -> dict[str, float]:
        """Steps of one checkpoint on the samples of numbered steps; with `spoil`, the last loss is no number."""
        api, norms = self._open_api, {}
        for number in range(first, first + count):
            for micro in api.forward_micro_batches([sample_input(each) for each in make_samples(number)]):
                loss = sum((-output.target_logprobs.sum() for output in micro.outputs), 0.0)
                api.backward(loss * torch.nan if spoil else loss)
            norms = api.optim_step(AdamParams(3e-3, weight_decay=0.1), scale_grads=0.1)
        return norms

    def keep_forward(
        self, rows: list[int], asked: dict[str, Any], *, grad: bool = True, unused: dict[str, Any] | None = None
    ) -> int:
        """Compute samples of this rank's own, and keep the outputs; returns how many there are.

        `unused` asks for a further one, on which the loss of `backward_kept` does not depend.
        """
        samples = make_samples(0, 9)
        asks = [asked] * len(rows) if unused is None else [*[asked] * len(rows), unused]
        inputs = [[sample_input(samples[row], **ask)] for row, ask in zip([*rows, 8], asks, strict=False)]
        with nullcontext() if grad else torch.no_grad():
            self._kept = self._open_api.dp_rank_forward(inputs)
        self._used = len(rows)
        return len(self._kept)

    def drop_kept(self, ranks: list[int]) -> None:
        if self._rank in ranks:
            self._kept = None

    def backward_kept(self) -> None:
        outputs = [output for (output,) in (self._kept or [])[: self._used]]
        self._open_api.backward(sum((output.target_logprobs.sum() for output in outputs), 0.0))

    def step_slots(self, checkpoints: list[str] | None = None) -> dict[str, float]:
        return self._open_api.optim_step(AdamParams(1e-3), checkpoints=checkpoints)

    def choose(self, calls: list[tuple[str, str | None]]) -> list[float]:
        """Call `set_*`, `push_*` or ``pop`` in order; after each, a log-probability of an input that names no slot."""
        api, found = self._open_api, []
        for do, name in calls:
            if do == "pop":
                api.pop_pushed_lora_or_checkpoint()
            else:
                getattr(api, do)(name)
            with torch.no_grad():
                output = api.dp_rank_forward(sample_input(make_samples(0, 1)[0]))
            assert isinstance(output, ForwardOutput)
            assert output.target_logprobs is not None
            found.append(float(output.target_logprobs.sum()))
        return found

    def sizes(self, lengths: list[int], limit: int) -> list[Any]:
        """Micro-batches of sequences of such lengths, twice: the second time, one was measured."""
        api = self._open_api
        api._limit = limit
        items = [ForwardInput(input_tokens=[1] * each, target_tokens=[2] * each) for each in lengths]
        found = []
        for _ in range(2):
            for micro in api.forward_micro_batches(items):
                stats = micro.stats
                found.append(
                    (stats.first, stats.items, list(micro.indices), stats.predicted_bytes, stats.measured_bytes)
                )
                api.backward(sum((output.target_logprobs.sum() for output in micro.outputs), 0.0))
                del micro
            api.zero_grad()
        return found

    def run_program(self, code: str, model: str, out: Path) -> dict[str, float]:
        """Run a program of the documentation, which may write into `out`; its norms."""
        names: dict[str, Any] = {"model_dir": model, "out": out}
        exec(code, names)
        return dict(names["norms"])

    def ask_own(self, **fields: Any) -> None:
        """Compute one input that is made of `fields`."""
        self._open_api.dp_rank_forward([ForwardInput(**fields)])

    def ask_alike(self, inputs: list[dict[str, Any]]) -> None:
        """Ask for micro-batches of inputs that are made of fields."""
        list(self._open_api.forward_micro_batches([ForwardInput(**fields) for fields in inputs]))


def _mixed(output: ForwardOutput, sample: Any, tokens: int, sequences: int) -> torch.Tensor:
    """A sample's part of `engine_batches.mixed`."""
    start = len(sample.prompt_ids) - 1
    assert output.target_logprobs is not None
    assert output.entropy is not None
    chosen, entropy = output.target_logprobs[start:], output.entropy[start:]
    return -sample.advantage * chosen.sum() / tokens + chosen.square().mean() / sequences - entropy.sum() / 50


def _plain(output: ForwardOutput) -> dict[str, Any]:
    assert output.top_k is not None
    assert output.logits is not None
    assert output.logits.shape[1] >= VOCAB
    tensors = {
        "logprobs": output.target_logprobs,
        "entropy": output.entropy,
        "logits": output.logits,
        "hidden": output.hidden_states,
        "top_tokens": output.top_k.tokens,
        "top_logprobs": output.top_k.logprobs,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
