"""The training engine contract: `TrainingEngine`, which holds one rank's share of the model and trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.engines.torch_distributed.process_group import reserve_port
from weightlane.sync.version.tensor_spec import LocalShard

from ...config import Head, TrainerConfig
from ...data.batch import LossDenominators, TokenBatch
from ...objectives.loss import LOGPROBS, Loss, OutputName
from ..optimizers.settings import AdamParams

SequenceOutputs = Mapping[str, torch.Tensor]
"""Outputs of one sequence by name, on the CPU: the values in `ModelOutputs` for its tokens."""
StatePart = Literal["parameters", "gradients", "optimizer"]
"""A part of an engine's state: weights and buffers, gradients, or the optimizer's own tensors."""
Fence = Callable[[Collection[str]], None]
"""Function that takes names of checkpoint tensors and waits until nobody reads these; see `TrainingEngine.optim_step`."""
STATE_PARTS: tuple[StatePart, ...] = ("parameters", "gradients", "optimizer")
"""All parts of an engine's state."""


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """The result of `TrainingEngine.forward_backward` on a batch."""

    metrics: Mapping[str, float]
    """``loss``, its terms, the metrics of the loss function, and ``tokens``; the same on every rank. See `LossSums.named`.

    An engine that can share prefixes adds ``read_tokens``, those of all sequences, and ``packed_tokens``, those it computed.
    """
    outputs: Mapping[int, SequenceOutputs] = field(default_factory=dict)
    """Outputs of this rank's sequences by their index in the batch; empty where none were asked for."""


class TrainingEngine(ABC):
    """One rank's share of a model in training.

    Each trainer rank is a process with one engine. The life of an engine, tagged by the ranks that run each step; a step
    tagged [all] is collective: every rank calls it, in the same order, or the others fail after
    ``TrainerConfig.collective_timeout_s``:

        1. [all]   Engine(config, rank, world, rendezvous)  cheap, connects to nothing
        2. [all]   setup(model_dir, seed)                    joins the other ranks, loads the weights
        3. [all]   load(directory)                           optional: resume from a saved state
        4. [all]   forward(batch)                            whenever no training step is half done
           [all]   forward_backward(batch, loss, denominators) } once or more, then
           [all]   optim_step(before_change)                 } once: one training step
        5. [any]   local_shards(wire_dtype)                  whenever no optim_step runs; never talks to a peer
        6. [all]   save(directory), export_hf(directory)     between training steps
        7. [any]   train(mode), offload(parts), onload(parts)    between the calls of 3 to 6
        8. [each]  close()                                   any number of times

    Instead of 2 to 7, `outline` and then `local_shards` describe what a rank would hold, without weights or other ranks.

    An engine is used from one thread. The tensors behind `local_shards` may be read from others: their values change in
    `optim_step`, `load` and `load_published` only, and their storage does in `offload` and `onload` only.

    Errors: `ConfigError` for a model or setting that cannot work, `PeerLostError` or `DeadlineExceededError` when another
    rank is gone or late, `AddressInUseError` for a rendezvous port that is taken, `StorageError` when a file cannot be
    read or written. Every rank of a failed collective raises; afterwards only `close` may be called.
    """

    has_adapters: ClassVar[bool] = False
    """Whether ``trainer.lora`` works, and the engine is an `AdapterEngine`."""
    optimizers: ClassVar[Collection[str]] = ("adamw",)
    """Values of ``trainer.optimizer`` that work."""
    replays_routing: ClassVar[bool] = False
    """Whether ``trainer.router_replay`` works: passes route tokens to the experts in their batch's `ROUTED_EXPERTS`."""

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        """Store the arguments. Nothing is loaded or connected yet.

        Args:
            config: the run's trainer section.
            rank: this process, 0 to `world` - 1.
            world: number of trainer ranks.
            rendezvous: host and port where rank 0 serves the ranks' store; not used when torch.distributed is initialised.

        Raises `ConfigError` for ``trainer.lora`` in an engine that has no adapters, for an optimizer that it lacks, and for
        ``trainer.router_replay`` in an engine without it.
        """
        if config.lora is not None and not self.has_adapters:
            raise self.without_adapters("trainer.lora")
        if config.optimizer not in self.optimizers:
            raise ConfigError(
                f"trainer.optimizer is {config.optimizer}, and the engine {config.engine!r} has {', '.join(self.optimizers)}.",
                part="trainer",
                hint="Choose another optimizer, or trainer.engine=fsdp2.",
            )
        if config.router_replay and not self.replays_routing:
            raise ConfigError(
                f"algorithm.router_replay is true, and the engine {config.engine!r} chooses experts itself.",
                part="trainer",
                hint="Set trainer.engine to fsdp2 or megatron, or algorithm.router_replay to false.",
            )
        self.config = config
        self.rank = rank
        self.world = world
        self.rendezvous = rendezvous

    @classmethod  # noqa: B027 - by default nothing
    def check(cls, config: TrainerConfig, model_dir: Path, state: Path | None = None) -> None:
        """Raise `ConfigError` when this engine cannot train the model in `model_dir` as `config` asks for, or `load` a `state`.

        Called before any process is started, on a directory that `check_model_dir` accepts; reads no weights.
        """

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps taken since the weights were first loaded; survives `save` and `load`.

        With ``trainer.lora``, those of its adapter.
        """

    @abstractmethod
    def setup(self, model_dir: Path, seed: int) -> None:
        """Join the other ranks and load the Hugging Face model in `model_dir` as float32 master weights.

        Args:
            model_dir: a directory that `check_model_dir` accepts, readable on every rank.
            seed: seeds this process's random generators, the same on every rank.
        """

    def outline(self, model_dir: Path) -> None:
        """Build this rank's part of the model without data, so that `local_shards` says what `setup` would put where.

        Runs in a process of its own, to which no GPU is visible. torch.distributed is initialised there as this rank of
        `world`, with torch's ``fake`` backend: collectives return at once, and nothing is sent. Parameters may be on the meta
        device. Only `local_shards` and `close` are called afterwards.

        Raises `ConfigError` as `setup`, and always in an engine that does not implement it.
        """
        del model_dir
        raise ConfigError(
            f"the training engine {self.config.engine!r} cannot say what its ranks hold without running.",
            part="training engine",
            hint="Implement TrainingEngine.outline in it, or choose another for trainer.engine.",
        )

    @abstractmethod
    def forward(
        self,
        batch: TokenBatch,
        outputs: Collection[OutputName] = LOGPROBS,
        top_k: int = 0,
        adapter: str | None = None,
    ) -> dict[int, SequenceOutputs]:
        """Compute outputs without gradient.

        Every rank passes the same batch, of any size, and works on its own share of it, in micro-batches.

        Args:
            batch: The sequences.
            outputs: What to compute, see `ModelOutputs`.
            top_k: How many of the most probable tokens to return for every position with a target, as ``top_tokens`` and
                ``top_logprobs``.
            adapter: The adapter that the model computes with; "" for its own weights only. None for the published weights: with
                the adapter of ``trainer.lora`` if that is set, else the model's own.

        Raises:
            ProtocolError: The model doesn't have a token or target, or its head doesn't have an output.

        Returns:
            Outputs by the index of their sequence in the batch. Over all ranks, each sequence is there once.
        """

    @abstractmethod
    def forward_backward(
        self,
        batch: TokenBatch,
        loss: Loss,
        denominators: LossDenominators | None = None,
        outputs: Collection[OutputName] = (),
        adapter: str | None = None,
    ) -> BackwardResult:
        """Add the gradient of `loss` over `batch` to the gradients.

        Every rank passes the same batch and works on its own share of it, in micro-batches. The sum of the gradients does not
        depend on how a mini-batch is split into calls, ranks and micro-batches.

        Args:
            batch: The sequences, a part of the mini-batch or all of it.
            loss: What is summed, and by what each sum is divided.
            denominators: Tokens and sequences of the full mini-batch; None if `batch` is all of it. The same in every call
                until `optim_step`.
            outputs: What to return of the forward pass.
            adapter: The adapter that the model computes with and whose gradients are accumulated, as in `forward`. Each adapter
                has a mini-batch of its own, and several adapters may be in the middle of one at once.

        Raises:
            ConfigError: There is no such adapter, or the model's own weights are frozen, as they are with ``trainer.lora``.
            ProtocolError: `denominators` are not those of the calls before, or the model doesn't have a token or target, or its
                head an output. If a forward or backward pass fails, the gradient of the full mini-batch is lost.
        """

    @abstractmethod
    def zero_grad(self, *adapters: str) -> None:
        """Drop accumulated gradients: those of `adapters`, where "" is the model's own weights, or all if none is named.

        Not collective.
        """

    @abstractmethod
    def optim_step(self, before_change: Fence, adapter: str | None = None, params: AdamParams | None = None) -> float:
        """Clip the gradients over all parameters, then change these part by part, and clear the gradients.

        `before_change` is the publication fence. It is called with the names of checkpoint tensors, directly before the first
        of their elements changes, and returns once nobody reads those tensors any more. Over one step it names every tensor
        that the step changes exactly once, in the order of `local_shards` and the same on every rank. An engine that steps
        everything at once calls it once with all names; one that has several parts lets the step begin while a snapshot of
        the later ones is still running. The result does not depend on the parts, bit for bit.

        Without a `forward_backward` before it, or when that failed, it raises `ProtocolError` and changes nothing.

        When the gradient norm is not finite (`GradientError`, on every rank and before the fence), or when the first
        `before_change` raises, no parameter has changed; the gradients may be gone. When a later one raises, some have: the
        engine is then between two steps and refuses everything but `load` and `close`.

        With an `adapter`, as in `forward`, only its gradients are clipped, and only its weights change. `before_change` is then
        called for the adapter of ``trainer.lora`` only, with the tensors that it is part of. `params` are AdamW's settings for
        this step, instead of those of the configuration.

        Returns:
            The global L2 norm of the gradients before clipping.
        """

    @classmethod
    def without_adapters(cls, asked: str) -> ConfigError:
        """Return the error of an engine without adapters; `asked` names the request that needs them."""
        return ConfigError(
            f"{cls.__name__} has no adapters, for which {asked} asks.",
            part="training engine",
            hint="Choose another for trainer.engine, such as fsdp2.",
        )

    def train(self, mode: bool) -> None:
        """Set whether `forward_backward` applies the dropout of the model's configuration; off at first. `forward` never does.

        Raises `ConfigError` if the engine has no dropout and `mode` is true.
        """
        if mode:
            raise ConfigError(
                f"the training engine {self.config.engine!r} trains without dropout.",
                part="training engine",
                hint="Leave out train(True): a policy is trained as it is sampled from, without dropout.",
            )

    @property
    def offloaded(self) -> frozenset[StatePart]:
        """The parts of the state that `offload` moved away, and `onload` has not brought back."""
        return frozenset()

    @property
    def device(self) -> torch.device:
        """The model's device; by default the CPU. Known after `setup`."""
        return torch.device("cpu")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the copies, in the host's memory, of what is `offloaded`."""
        return 0

    def offload(self, parts: Collection[StatePart] = STATE_PARTS) -> None:
        """Move parts of the state to the host's memory, and free their memory on the device. Not collective.

        Nobody may read the parameters: their readers are waited for as before a step, see `optim_step`. While parameters are
        offloaded, the tensors behind `local_shards` have no memory. A call that needs an offloaded part raises `ProtocolError`:
        `forward` and `export_hf` need the parameters; `forward_backward` also the gradients; `save`, `load` and `export_adapter`
        parameters and optimizer; `optim_step` all three.
        On the CPU the same happens, which frees nothing. Parts that are offloaded already stay so.

        Raises `ConfigError` in an engine that can't.
        """
        if parts:
            raise ConfigError(
                f"the training engine {self.config.engine!r} keeps its state where it is.",
                part="training engine",
                hint="Give roles that share a device one that can, such as fsdp2.",
            )

    def onload(self, parts: Collection[StatePart] = STATE_PARTS) -> None:
        """Bring back parts of the state that `offload` moved away, bit for bit; others stay as they are. Not collective."""
        del parts

    @abstractmethod
    def local_shards(self, wire_dtype: torch.dtype) -> list[LocalShard]:
        """The checkpoint tensors, or slices of them, that this rank publishes. Not collective; moves no data.

        Over all ranks the slices cover every element of every checkpoint tensor. Slices of one rank do not overlap; elements that
        several ranks hold are equal on all of them. Names are the ones a Hugging Face checkpoint uses on disk, tied tensors are
        listed once, and the order is the same on every rank.

        Args:
            wire_dtype: dtype of floating-point tensors on the wire, except those that a narrower model keeps in float32
                (`weightlane.sync.version.tensor_spec.kept_in_float32`); others keep theirs. `data` is the float32 master weight,
                with the adapter of ``trainer.lora`` added where that is set; weights that it leaves unchanged may have the
                checkpoint's half precision.

        Where ``trainer.lora.publish`` is ``adapter``, the tensors are A and B of every layer of that adapter instead, whose names
        are PEFT's.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the full training state: weights, adapters, optimizers, steps and random state. `directory` must not exist.

        It appears complete or, after any failure, not at all. Any number of ranks can `load` it.
        """

    @abstractmethod
    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Resume from a state of `save`; gradients are cleared. With the same number of ranks, training continues bit for bit.

        Without `optimizer`, and from a Hugging Face directory of the same architecture, training starts over from the weights
        there, at step 0 and with zero moments.

        Raises `ConfigError`, and changes nothing, if the directory holds no state or model, another model, or other adapters than
        the engine has; `StorageError` for a file that cannot be read: then only another `load`, or `close`, may follow.
        """

    @abstractmethod
    def export_hf(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face model directory, tokenizer included, with weights in `dtype`, except those that stay float32.

        The adapter of ``trainer.lora`` is part of these weights, other adapters aren't.
        `directory` must not exist. It appears complete or, after any failure, not at all.
        """

    @classmethod
    def export_saved(
        cls, state: Path, model_dir: Path, directory: Path, dtype: torch.dtype, head: Head = "tokens"
    ) -> None:
        """Write the saved training state in `state` as a Hugging Face model directory, in one process, on the CPU.

        `head` is the ``TrainerConfig.head`` that it was saved with. By default an engine of one rank loads the full state.
        """
        with reserve_port("127.0.0.1") as reserved:
            address = reserved.getsockname()[:2]
        engine = cls(TrainerConfig(device="cpu", head=head), 0, 1, (str(address[0]), int(address[1])))
        try:
            engine.setup(model_dir, seed=0)
            engine.load(state)
            engine.export_hf(directory, dtype)
        finally:
            engine.close()

    @abstractmethod
    def close(self) -> None:
        """Leave the process group this engine made and free the model. Never raises."""
