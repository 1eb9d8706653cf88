"""Device memory of forward passes: predicted before a pass, measured during it, and the memory that is available."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from weightlane.ckpt_engines.runtime.process_memory import available_memory_bytes

from .inputs import ForwardInput

_SAFETY = 1.1
"""Factor between the measured memory and a prediction."""
_RESERVE = 0.03
"""Share of the free memory that is not used."""
_REMEMBERED = 16
"""Measured passes that an estimate rests on."""
_PLENTY = 2**62
_FLOAT32, _INT64 = 4, 8


class MemoryEstimate:
    """Bytes of forward passes on this rank: a part for each token, and a fixed part, such as a kernel's workspace.

    The initial estimate is that a pass with gradient keeps every matrix's input and output twice, and a pass without gradient
    four times those of the widest matrix. What a measured pass took beyond that is taken for fixed, until passes of other lengths
    have been measured. Old measurements are forgotten. `widths` are the numbers of inputs plus outputs of each matrix, `itemsize`
    the bytes of a number in a forward pass, and `hidden` is the width of the head's input.
    """

    def __init__(self, widths: Sequence[int], itemsize: int, vocabulary: int, hidden: int) -> None:
        self._itemsize, self._vocabulary, self._hidden = itemsize, vocabulary, hidden
        kept = {True: 2 * sum(widths), False: 4 * max(widths, default=0)}
        self._first_guess = {gradient: float(itemsize * kept[gradient]) for gradient in (True, False)}
        self.per_token = dict(self._first_guess)
        """Bytes for each token, outputs not counted, of passes with and without gradient."""
        self.fixed = {True: 0.0, False: 0.0}
        """Bytes of a pass of any length."""
        self._measured = {gradient: deque[tuple[int, int]](maxlen=_REMEMBERED) for gradient in (True, False)}
        """Tokens of the last measured passes, and their bytes without outputs."""
        self._fitted = {True: (0, 0), False: (0, 0)}
        """The longest measured pass in tokens, and the most bytes that one took: a shorter pass is not predicted to take more."""

    @property
    def most_fixed(self) -> int:
        """Bytes that a pass of any length takes, with gradient or without."""
        return round(max(self.fixed.values()))

    def of(self, each: ForwardInput, *, gradient: bool) -> int:
        """Bytes that an input is predicted to take beside the fixed part."""
        tokens, (longest, most) = len(each.tokens), self._fitted[gradient]
        predicted = _SAFETY * self.per_token[gradient] * tokens
        if tokens <= longest:
            predicted = min(predicted, max(0.0, most - self.fixed[gradient]))
        return round(predicted) + self.outputs_of(each, gradient=gradient)

    def outputs_of(self, each: ForwardInput, *, gradient: bool) -> int:
        """Bytes of the outputs of an input and, in a pass with gradient, of the gradients with respect to them."""
        floats = each.labels + each.entropy + each.logits * self._vocabulary
        wide = each.hidden_states * self._hidden * self._itemsize
        both = (floats * _FLOAT32 + wide) * (2 if gradient else 1)
        return len(each.tokens) * (both + each.top_k * (_FLOAT32 + _INT64))

    def wants_measuring(self, tokens: int, *, gradient: bool) -> bool:
        """Whether to measure a pass: if it is more than twice as long as any before."""
        return tokens > 2 * max((length for length, _ in self._measured[gradient]), default=0)

    def learn(
        self, inputs: Collection[ForwardInput], measured: int, *, gradient: bool, computed: int | None = None
    ) -> None:
        """Update the estimate with the bytes that a pass took, outputs included.

        `computed` is the number of tokens that it computed; None for all those of the inputs. Inputs that share a prefix take
        less than is predicted for them, and must not make others seem smaller.
        """
        tokens = sum(len(each.tokens) for each in inputs) if computed is None else computed
        if not tokens or not measured:
            return
        outputs = sum(self.outputs_of(each, gradient=gradient) for each in inputs)
        passes = self._measured[gradient]
        passes.append((tokens, max(0, measured - outputs)))
        (short, least), (long, most) = min(passes), max(passes)
        told_apart = long >= 2 * short  # between passes of about one length, noise would count as length
        slope = (most - least) / (long - short) if told_apart else min(self._first_guess[gradient], most / long)
        self.per_token[gradient] = max(0.0, slope)
        self.fixed[gradient] = max(0.0, *(nbytes - slope * length for length, nbytes in passes))
        self._fitted[gradient] = long, max(nbytes for _, nbytes in passes)

    def to_plain(self) -> list[list[float]]:
        """All that predictions depend on, with and without gradient, for another rank's `raise_to`."""
        return [[self.per_token[each], self.fixed[each], *self._fitted[each]] for each in (True, False)]

    def raise_to(self, others: Sequence[Sequence[Sequence[float]]]) -> None:
        """Adopt the highest estimate of all ranks, so that all ranks predict and plan alike."""
        for number, gradient in enumerate((True, False)):
            per_token, fixed, longest, most = zip(*(each[number] for each in others), strict=True)
            self.per_token[gradient], self.fixed[gradient] = max(per_token), max(fixed)
            self._fitted[gradient] = int(min(longest)), int(max(most))


class Meter:
    """Measures the memory of a pass: on a GPU by torch's allocator, on a CPU by the tensors that are kept for the gradient."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.bytes = 0
        """The largest measurement so far."""

    @contextmanager
    def forward(self, *, measured: bool) -> Iterator[None]:
        """Measure the forward pass inside the block. On a CPU only if `measured`, because that takes time."""
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            with self.backward():
                yield
        elif measured and torch.is_grad_enabled():
            kept: dict[int, int] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                of = tensor if tensor._base is None else tensor._base
                if not isinstance(of, torch.nn.Parameter):
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storage = local.untyped_storage()
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor.detach()  # the tensor itself could keep itself alive

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                yield
            self.bytes = sum(kept.values())
        else:
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure the backward pass inside the block, whose peak counts, too."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        self.bytes = max(self.bytes, torch.cuda.max_memory_allocated(self._device) - self._before)


def free_bytes(device: torch.device) -> int:
    """Bytes that passes of this rank may take; on a CPU, the rank's share of the machine's available memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    else:
        known = available_memory_bytes()
        free = _PLENTY if known is None else known // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    left = int(free * (1 - _RESERVE))
    return left & -(1 << max(0, left.bit_length() - 6))  # two figures, so that small changes change no plan
