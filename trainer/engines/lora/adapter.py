"""`Adapter`: one low-rank adapter on one rank, with its gradients, its AdamW and its step count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box

from ...config import LoraConfig, TrainerConfig
from ...data.batch import LossDenominators
from ..contract import StatePart
from ..optimizers.adamw import AdamW
from ..optimizers.settings import MOMENTS, AdamParams
from .sites import MATRICES, PART, LoraSite, initial_a


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """The process groups over which an adapter's gradients and norms are summed; None for a group of only this rank."""

    data: dist.ProcessGroup | None
    """The ranks that hold the same parts and work on different samples."""
    tensor: dist.ProcessGroup | None
    """The ranks of tensor parallelism."""
    model: dist.ProcessGroup | None
    """The ranks that together hold all parts: those of tensor and pipeline parallelism."""
    first_of_tensor: bool
    """Whether this rank is the one that counts, in norms, tensors that every rank of tensor parallelism holds."""
    expert_data: dist.ProcessGroup | None = None
    """The ranks that hold the same experts."""
    expert_model: dist.ProcessGroup | None = None
    """The ranks that together hold the experts of all layers, each of them once."""
    divide_moments: bool = False
    """Whether AdamW's moments are divided among the ranks that hold the same parts, instead of repeated on each."""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """This rank's part of A and B of one layer."""

    site: LoraSite
    matrices: Mapping[str, torch.nn.Parameter]
    """float32 A [rank, held columns] and B [held rows, rank]."""
    scale: float

    @property
    def down(self) -> torch.nn.Parameter:
        """A."""
        return self.matrices["A"]

    @property
    def up(self) -> torch.nn.Parameter:
        """B."""
        return self.matrices["B"]

    @property
    def width(self) -> int:
        """The adapter's rank: the size of A's output for a token."""
        return len(self.down)

    def lowered(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute A x: [..., rank] from this rank's columns [..., held columns], in the dtype of `inputs`."""
        return linear(inputs, self.down.to(inputs.dtype))

    def raised(self, low: torch.Tensor) -> torch.Tensor:
        """Compute scale * B (A x): [..., held rows] from A x, [..., rank].

        B is never multiplied by A to add the product to the layer's weight: half precision would lose small changes.
        """
        return linear(low * self.scale, self.up.to(low.dtype))

    def added(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute both products, for a layer that needs no collective in between."""
        return self.raised(self.lowered(inputs))


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    """A part of one tensor of an adapter: a rectangle of A, of B, or of one of their moments, and its data on this rank."""

    key: str
    """``module|A|weight`` and the like."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    box: Box
    data: torch.Tensor


class Adapter:
    """This rank's A and B of every adapted layer, as float32 parameters, with their optimizer if the adapter is trained.

    `values` are the full A and B of every layer by ``module|A`` and ``module|B``; None for initial values. `trainer` has AdamW's
    settings.
    """

    def __init__(
        self,
        name: str,
        config: LoraConfig,
        trainer: TrainerConfig,
        sites: Sequence[LoraSite],
        values: Mapping[str, torch.Tensor] | None,
        device: torch.device,
        groups: LoraGroups,
        *,
        trained: bool = True,
    ) -> None:
        self.name, self.config, self.trained, self._groups = name, config, trained, groups
        self.step = 0
        """Optimizer steps taken."""
        self.denominators: LossDenominators | None = None
        """Denominators of the mini-batch whose gradients are being accumulated, if any."""
        own = {"learning_rate": config.learning_rate} if config.learning_rate is not None else {}
        self._trainer, self._device = trainer.model_copy(update=own), device
        self.pairs: dict[str, LoraPair] = {}
        for site in sites:
            matrices = {}
            for matrix in MATRICES:
                if values is not None:
                    whole = values[f"{site.module}|{matrix}"]
                else:
                    whole = initial_a(config, site) if matrix == "A" else torch.zeros(site.rows, config.rank)
                held = whole[site.box(matrix, config.rank).index].to(device, torch.float32, copy=True)
                matrices[matrix] = torch.nn.Parameter(held.contiguous(), requires_grad=trained)
            self.pairs[site.module] = LoraPair(site, matrices, config.scale)
        self.parameters = [parameter for pair in self.pairs.values() for parameter in pair.matrices.values()]
        self._state: Mapping[torch.Tensor, dict[str, torch.Tensor]] = {}
        """AdamW's moments and steps of each parameter that this rank steps."""
        self._divided = self._divide(groups) if groups.divide_moments and trained else []
        if trained:
            stepped = [part for group, parts in self._divided for part in parts[dist.get_rank(group)]]
            self._optimizer = AdamW("adamw", [{"params": stepped if self._divided else self.parameters}])
            self._state = self._optimizer.state

    def _divide(self, groups: LoraGroups) -> list[tuple[dist.ProcessGroup, list[list[torch.nn.Parameter]]]]:
        """Return, for each group of ranks that hold the same parameters, those that each of its ranks steps.

        Whole matrices, the largest first, each to the rank that has least so far. The ranks agree without communication.
        """
        found = []
        for group, expert in ((groups.data, False), (groups.expert_data, True)):
            if group is None:
                continue
            parts: list[list[torch.nn.Parameter]] = [[] for _ in range(dist.get_world_size(group))]
            held = [
                each for pair in self.pairs.values() if pair.site.expert is expert for each in pair.matrices.values()
            ]
            for parameter in sorted(held, key=torch.Tensor.numel, reverse=True):
                min(parts, key=lambda part: sum(each.numel() for each in part)).append(parameter)
            found.append((group, parts))
        return found

    def slices(self) -> Iterator[AdapterSlice]:
        """Yield this rank's parts of all tensors of the adapter, moments included if it has any."""
        for module, pair in self.pairs.items():
            for matrix, parameter in pair.matrices.items():
                rank, state = self.config.rank, self._state.get(parameter, {})
                shape, box = pair.site.shape(matrix, rank), pair.site.box(matrix, rank)
                for kind, data in (("weight", parameter.detach()), *((key, state[key]) for key in MOMENTS if state)):
                    yield AdapterSlice(f"{module}|{matrix}|{kind}", shape, box, data)

    def memory_of(self, part: StatePart) -> list[torch.Tensor]:
        """List the tensors of `part` of the adapter's state."""
        if part == "parameters":
            return list(self.parameters)
        if part == "gradients":
            return [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [tensor for state in self._state.values() for tensor in state.values()]

    def clear_gradients(self) -> None:
        """Drop the accumulated gradients, and the mini-batch that they are of."""
        self.denominators = None
        for parameter in self.parameters:
            parameter.grad = None

    def complete_gradients(self, scale: float = 1.0) -> float:
        """Sum the gradients over the ranks and multiply them by `scale`; returns the full adapter's gradient norm. Collective."""
        groups = self._groups
        for parameter in self.parameters:
            if parameter.grad is None:  # a rank without any sequence
                parameter.grad = torch.zeros_like(parameter)
        named = [(pair.site, matrix, each) for pair in self.pairs.values() for matrix, each in pair.matrices.items()]
        shared = [entry for entry in named if not entry[0].expert]
        experts = [parameter for site, _, parameter in named if site.expert]
        _add_up([parameter for *_, parameter in shared], groups.data)
        _add_up([parameter for site, matrix, parameter in shared if matrix in site.partial], groups.tensor)
        _add_up(experts, groups.expert_data)
        counted = [parameter for site, matrix, parameter in shared if groups.first_of_tensor or site.splits(matrix)]
        square = _square(counted, groups.model, self._device) + _square(experts, groups.expert_model, self._device)
        if scale != 1.0:
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
        return float(square.sqrt()) * abs(scale)

    def change(self, norm: float, before_change: Callable[[], None], params: AdamParams | None = None) -> None:
        """Clip the gradients, whose L2 norm is `norm`, take one step, and drop them.

        `before_change` is called directly before anything changes; if it raises, the gradients are dropped. Without `params`,
        the configurations have AdamW's settings.
        """
        params = params or AdamParams.of(self._trainer, self.step)
        try:
            before_change()
            scale = min(1.0, params.max_grad_norm / (norm + 1e-6))  # torch's own formula; 1 where there is no limit
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
            params.set_in(self._optimizer)
            self._optimizer.step()
            self.step += 1
        finally:
            self.clear_gradients()

    @torch.no_grad()
    def share_steps(self) -> None:
        """Give the other ranks what this one stepped, and take what they did, where moments are divided. Collective."""
        for group, parts in self._divided:
            longest = max(sum(each.numel() for each in part) for part in parts)
            if len(parts) == 1 or not longest:
                continue
            stepped = [parameter.flatten() for parameter in parts[dist.get_rank(group)]]
            mine = torch.zeros(longest, device=self._device)
            if stepped:
                flat = torch.cat(stepped)
                mine[: len(flat)] = flat
            theirs = [torch.empty_like(mine) for _ in parts]
            dist.all_gather(theirs, mine, group=group)
            for flat, part in zip(theirs, parts, strict=True):
                sizes = [each.numel() for each in part]
                for parameter, values in zip(part, torch.split(flat[: sum(sizes)], sizes), strict=True):
                    parameter.copy_(values.view_as(parameter))

    def set_step(self, step: int) -> None:
        """Set the step count of the adapter and of its loaded moments."""
        self.step = step
        for state in self._state.values():
            state["step"].fill_(step)

    def resume(self, saved: tuple[Mapping[str, torch.Tensor], int] | None, directory: Path) -> None:
        """Load the moments and steps that `read_optimizer` read from `directory`; does nothing if `saved` is None."""
        if saved is None:
            return
        moments, step = saved
        for piece in self.slices():
            if piece.key.endswith(MOMENTS):
                whole = moments.get(piece.key)
                if whole is None or tuple(whole.shape) != piece.shape:
                    raise ConfigError(
                        f"the optimizer in {directory} lacks {piece.key} of shape {list(piece.shape)}.",
                        part=PART,
                        hint="Load the directory as the one who saved it left it, or without its optimizer.",
                    )
                piece.data.copy_(whole[piece.box.index])
        self.set_step(step)


def _square(
    parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None, device: torch.device
) -> torch.Tensor:
    """Sum the squares of the gradients of `parameters` over `group`, all of whose ranks must call this: float64 []."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        assert parameter.grad is not None
        # Squares are float32, so that an exploding gradient becomes infinite; their sum over layers is float64.
        square += parameter.grad.square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square


def _add_up(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum the gradients of `parameters` over `group`, in one all-reduce."""
    if group is None or dist.get_world_size(group) == 1 or not parameters:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
