"""`TorchEngine`, the base of training engines on torch.distributed: joins the ranks, counts steps, refuses what cannot work."""

from __future__ import annotations

import gc
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from weightlane.ckpt_engines import ConfigError, GradientError, ProtocolError, WeightlaneError
from weightlane.sync.version.tensor_spec import dtype_of

from ..config import TrainerConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.packing import PrefixGroup, micro_batches, shared_prefixes
from ..data.sequences import MicroBatch
from ..objectives.loss import ModelOutputs, OutputName
from .contract import STATE_PARTS, SequenceOutputs, StatePart, TrainingEngine
from .offloading import HostCopies
from .rank_collectives import join_ranks, leave_ranks, typed_collective_errors

OUTPUTS_OF_HEAD: dict[str, tuple[OutputName, ...]] = {
    "tokens": ("logprobs", "entropy", "hidden"),
    "value": ("values", "hidden"),
}
"""Outputs that a model can return, by ``trainer.head``."""


TOP = ("top_tokens", "top_logprobs")
"""Outputs that ``top_k`` adds to a forward pass."""


class TorchEngine(TrainingEngine):
    """A training engine whose ranks join torch.distributed's default group.

    Subclasses set `_torn` while a step has changed some parameters and not yet the others. They also count `_step`.
    """

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._part = f"trainer rank {rank}"
        self._device = self._choose_device()
        self._has_joined = self._owns_group = False
        self._torn = False
        self._step = 0
        self._vocabulary = 0
        """Size of the model's vocabulary, in tokens; set when the model is built."""
        self._denominators: LossDenominators | None = None
        """Denominators of the mini-batch whose gradients are being accumulated, if any."""
        self._kept: Collection[str] = ()
        """Names of checkpoint tensors that stay float32, whatever dtype the others are sent or exported in."""
        self._away: dict[StatePart, HostCopies] = {}
        """Host copies of the parts of the state that are offloaded."""
        self._pinned: dict[StatePart, dict[torch.device, torch.Tensor]] = {}
        """Pinned host memory for each part of the state, by device, since it was first offloaded."""
        self._dropout = False

    @property
    def step(self) -> int:
        """See `TrainingEngine.step`."""
        return self._step

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self._device

    @property
    def vocabulary(self) -> int:
        """Size of the model's vocabulary, in tokens."""
        return self._vocabulary

    def zero_grad(self, *adapters: str) -> None:
        """See `TrainingEngine.zero_grad`."""
        if not adapters or "" in adapters:
            self._clear_gradients()

    def train(self, mode: bool) -> None:
        """See `TrainingEngine.train`."""
        self._dropout = mode

    @property
    def offloaded(self) -> frozenset[StatePart]:
        """See `TrainingEngine.offloaded`."""
        return frozenset(self._away)

    @property
    def offloaded_bytes(self) -> int:
        """See `TrainingEngine.offloaded_bytes`."""
        return sum(copies.nbytes for copies in self._away.values())

    def offload(self, parts: Collection[StatePart] = STATE_PARTS) -> None:
        """See `TrainingEngine.offload`."""
        self._check_parts(parts)
        for part in parts:
            if part not in self._away:
                self._away[part] = HostCopies(self._memory_of(part), self._pinned.setdefault(part, {}))

    def onload(self, parts: Collection[StatePart] = STATE_PARTS) -> None:
        """See `TrainingEngine.onload`."""
        self._check_parts(parts)
        for part in parts:
            if part in self._away:
                self._away[part].restore()  # if there is no room for it, it stays offloaded
                del self._away[part]

    @abstractmethod
    def _memory_of(self, part: StatePart) -> Iterable[torch.Tensor]:
        """Return this rank's tensors of `part` of the state. Raises `ClosedError` before `setup`."""

    def _check_parts(self, parts: Collection[StatePart]) -> None:
        if isinstance(parts, str) or (unknown := sorted(set(parts) - set(STATE_PARTS))):
            named = parts if isinstance(parts, str) else ", ".join(unknown)
            raise ConfigError(
                f"{named!r} is no collection of parts of an engine's state.",
                part=self._part,
                hint=f"Parts are {', '.join(STATE_PARTS)}; pass a tuple of them.",
            )

    def _require_here(self, *parts: StatePart) -> None:
        """Raise unless these parts of the state are on the device."""
        if missing := [part for part in parts if part in self._away]:
            raise ProtocolError(
                f"the {' and the '.join(missing)} of the model are offloaded.",
                part=self._part,
                hint="Call onload before whatever needs them.",
            )

    def _check_outputs(self, wanted: Collection[OutputName], top_k: int = 0) -> None:
        """Raise `ProtocolError` for an output that the model's head doesn't have."""
        offered = OUTPUTS_OF_HEAD[self.config.head]
        if top_k < 0 or top_k > (self._vocabulary if self.config.head == "tokens" else 0):
            raise ProtocolError(
                f"top_k is {top_k}; a model with trainer.head={self.config.head} of {self._vocabulary} tokens has not as many.",
                part=self._part,
            )
        if odd := sorted(set(wanted) - set(offered)):
            raise ProtocolError(
                f"a model with trainer.head={self.config.head} has no {' and no '.join(odd)}.",
                part=self._part,
                hint=f"It has {', '.join(offered)}: pass some of these as outputs, and decorate a loss by needs.",
            )

    @property
    def _compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        asked = self.config.compute_dtype
        if asked != "auto":
            return dtype_of(asked)
        return torch.bfloat16 if self._device.type == "cuda" else torch.float32

    @property
    def _pass_tokens(self) -> int:
        """Most tokens of a micro-batch, of all ranks that share it."""
        return self.config.micro_batch_tokens

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Drop this rank's gradients, and the mini-batch that they are of."""

    def _choose_device(self) -> torch.device:
        available = torch.cuda.is_available()
        if self.config.device == "cuda" and not available:
            raise ConfigError("trainer.device is cuda, but torch sees no CUDA device.", part="trainer")
        if self.config.device == "cpu" or not available:
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def _join(self, model_dir: Path, seed: int) -> None:
        """Prepare this process to train the model in `model_dir`, and join the other ranks. Collective."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(self.config.threads_per_rank)
        random.seed(seed)
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._has_joined = True
        self._owns_group = join_ranks(
            self.rank, self.world, self.rendezvous, self._device, self.config.collective_timeout_s
        )

    def _leave(self) -> None:
        """Leave the ranks that `_join` joined. Idempotent, never raises.

        The objects that used a process group are garbage by now, most of them in reference cycles. They are collected at once:
        until then every gloo group keeps three threads, one of which polls a hundred times a second.
        """
        if not self._has_joined:
            return
        self._has_joined = False
        if self._owns_group:
            self._owns_group = False
            leave_ranks()
        gc.collect()

    def _collective(self, waiting_for: str) -> AbstractContextManager[None]:
        return typed_collective_errors(waiting_for, self._part, self.config.collective_timeout_s)

    @contextmanager
    def _torn_unless_refused(self) -> Iterator[None]:
        """Wrap the loading of a state. A failure leaves the state unchanged (`ConfigError`), or torn until another `load`."""
        try:
            yield
        except ConfigError:  # a state that does not fit is refused before anything changes
            raise
        except BaseException:
            self._torn = True
            raise
        self._torn = False

    def _refuse_torn(self) -> None:
        if self._torn:
            raise WeightlaneError(
                f"step {self._step} stopped when some parameters had changed and others had not.",
                part=self._part,
                hint="Load a saved state, or end this run; the error of that step says why it stopped.",
            )

    def _refuse_not_finite(self, norm: float, step: int, clear: Callable[[], None], of: str = "") -> None:
        """Unless the gradient norm at `step` is finite, drop the gradients with `clear` and raise `GradientError`."""
        if not math.isfinite(norm):
            clear()
            raise GradientError(
                f"the gradient norm{of} is {norm} at step {step}; no parameter was changed.",
                part=self._part,
                hint="Lower trainer.learning_rate, or look for broken log-probabilities or rewards in the batch.",
            )

    def _require_gradient(self, begun: LossDenominators | None, step: int) -> None:
        """Raise `ProtocolError` before a step without gradients: none were computed, or a forward or backward pass failed."""
        if begun is None:
            raise ProtocolError(
                f"there is no gradient for step {step + 1}.",
                part=self._part,
                hint="Call forward_backward before optim_step; if that failed, start the mini-batch over.",
            )

    def _same_denominators(
        self, begun: LossDenominators | None, batch: TokenBatch, denominators: LossDenominators | None
    ) -> LossDenominators:
        """Return the denominators of the mini-batch that `batch` is part of.

        Raises `ProtocolError` if they differ from `begun`, those of the mini-batch whose gradients are being accumulated, or if
        `batch` is to be a complete mini-batch beside it.
        """
        if begun is not None and denominators is None:
            raise ProtocolError(
                "a second mini-batch was begun before the step for the first was taken: their gradients would be added.",
                part=self._part,
                hint="Call optim_step first, or pass the denominators of both batches together to each forward_backward.",
            )
        found = denominators or LossDenominators.of(batch)
        if begun is not None and begun != found:
            raise ProtocolError(
                f"a mini-batch of {found.tokens:g} tokens and {found.sequences:g} sequences was begun before the step for one of"
                f" {begun.tokens:g} and {begun.sequences:g} was taken.",
                part=self._part,
                hint="Pass the same denominators to every forward_backward until optim_step.",
            )
        return found

    def _share(
        self, batch: TokenBatch, data_rank: int, data_world: int, *, padded: bool, share_prefixes: bool = False
    ) -> list[tuple[list[int], MicroBatch]]:
        """Return this rank's micro-batches of `batch`, on its device, each with the indices of its sequences.

        Raises `ProtocolError`, on every rank, for a token or target that the model doesn't have.
        """
        batch.check_vocabulary(self._vocabulary)
        limit = self._pass_tokens
        about = {"padded": padded, "share_prefixes": share_prefixes}
        shares = micro_batches_of([batch], (data_rank, data_world), limit, self._device, **about)
        return [(indices, micro) for ((_, indices, micro),) in shares]


def micro_batches_of(
    batches: Sequence[TokenBatch],
    data_share: tuple[int, int],
    max_tokens: int,
    device: torch.device,
    *,
    padded: bool,
    share_prefixes: bool = False,
) -> list[list[tuple[int, list[int], MicroBatch]]]:
    """Split several batches into one rank's micro-batches, each a list of parts of these batches.

    A part has the number of its batch, the indices of its sequences in that batch, and these sequences on `device`. Every batch
    has at least one part, possibly without sequences, so that every rank computes every loss. If there are several batches, their
    `TokenBatch.sequences_per_unit` must be 1. With `share_prefixes`, sequences of one batch that begin alike stay together, and
    what they share counts once.
    """
    rows = [(number, index) for number, batch in enumerate(batches) for index in range(len(batch))]
    lengths = [batches[number].sequences[index].length for number, index in rows]
    (data_rank, data_world), sequences_per_unit = data_share, batches[0].sequences_per_unit
    prefixes = _prefixes(batches) if share_prefixes else ()
    planned = micro_batches(
        lengths, data_world, max_tokens, padded=padded, sequences_per_unit=sequences_per_unit, prefixes=prefixes
    )
    shares: list[dict[int, list[int]]] = []
    for chosen in planned[data_rank]:
        shares.append({})
        for number, index in (rows[each] for each in chosen):
            shares[-1].setdefault(number, []).append(index)
    missing = set(range(len(batches))).difference(*shares)
    shares[0].update({number: [] for number in missing})

    def packed(batch: TokenBatch, indices: Sequence[int]) -> MicroBatch:
        if not indices:
            return MicroBatch.without_targets(batch.sequences[0], sequences_per_unit).to(device)
        return MicroBatch.of([batch.sequences[index] for index in indices], sequences_per_unit).to(device)

    return [
        [(number, indices, packed(batches[number], indices)) for number, indices in (share or {0: []}).items()]
        for share in shares
    ]


def _prefixes(batches: Sequence[TokenBatch]) -> list[PrefixGroup]:
    """Find the prefixes that sequences of one batch share; members are counted over all batches."""
    found: list[PrefixGroup] = []
    first = 0
    for batch in batches:
        groups = shared_prefixes(batch.packed.prefix_keys)
        found += [PrefixGroup(tuple(first + member for member in each.members), each.shared) for each in groups]
        first += len(batch)
    return found


def outputs_by_sequence(
    indices: Sequence[int], micro: MicroBatch, outputs: ModelOutputs, wanted: Collection[str]
) -> dict[int, SequenceOutputs]:
    """Return the `wanted` outputs of a micro-batch, on the CPU, by the index of their sequence in its batch."""
    found: dict[int, dict[str, torch.Tensor]] = {index: {} for index in indices}
    for name in wanted:
        # A micro-batch without targets has one sequence although `indices` is empty.
        for index, values in zip(indices, micro.split(outputs.required(name).detach().cpu()), strict=False):
            found[index][name] = values
    return dict(found)
