"""The language-model head without whole logits: log-probabilities of targets and entropies, in chunks over tokens.

No float32 tensor of [tokens, vocabulary] ever exists, neither forward nor backward: logits of a chunk are computed, reduced and
dropped, and computed again for the gradient. Ranks may each hold some rows of the head (vocabulary parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..data.batch import IGNORED

CHUNK_BYTES = 128 * 2**20
"""Most bytes of the float32 logits of a chunk; a chunk has at least `LEAST_ROWS` tokens."""
LEAST_ROWS = 64


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The last step of a model, after its head: logits become ``softcap * tanh(scale * logits / softcap)``.

    Without a softcap they become ``scale * logits``.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The transformed `logits`."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def times_slope(self, gradient: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """The gradient by the head's logits, from that by the transformed ones; overwrites `gradient`."""
        if self.softcap is not None:
            gradient *= 1 - (transformed / self.softcap).square()
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows of the head that this rank holds."""

    first: int
    """Token of the first row."""
    group: dist.ProcessGroup
    """The ranks that hold all rows together."""


def head_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    transform: LogitTransform | None = None,
    share: VocabularyShare | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of targets and entropies of the distributions they are drawn from, both with gradient.

    Args:
        hidden: [rows, width], what the head reads, any floating dtype.
        weight: [vocabulary, width] in the same dtype, without padding; with `share`, this rank's rows of it.
        targets: int64 [rows] or [rows, labels], each a token of the whole vocabulary or `IGNORED`.
        entropy: Whether entropies are wanted; they cost another pass over the logits.
        bias: [vocabulary], added to logits.
        temperatures: float32 [rows], by which logits are divided.
        transform: What the model does with logits after its head.
        share: Which rows of the head `weight` has. All ranks of its group call this together, with equal `hidden`. The gradient
            by `hidden` is this rank's part: add it up over the group.
        chunk_bytes: See `CHUNK_BYTES`.

    Returns:
        float32 log-probabilities, of the shape of `targets`, 0 where those are `IGNORED`; and float32 [rows] entropies in
        nats, or zeros if they are not wanted.
    """
    labels = targets if targets.ndim > 1 else targets.unsqueeze(1)
    logprobs, entropies = _Head.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, bias, labels, entropy, temperatures, transform or LogitTransform(), share, chunk_bytes
    )
    return logprobs if targets.ndim > 1 else logprobs.sum(1), entropies  # no view, of which FSDP would warn


class _Head(torch.autograd.Function):
    """Keeps what the head reads, the normalisers and the entropies; logits are computed again for the gradient.

    With probabilities p of logits z and entropy H: the gradient of a target's log-probability by z is ``[z is it] - p``, and
    that of the entropy is ``-p (log p + H)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        with_entropy: bool,
        temperatures: torch.Tensor | None,
        transform: LogitTransform,
        share: VocabularyShare | None,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = labels != IGNORED
        local = labels - (share.first if share else 0)
        here = counts & (local >= 0) & (local < len(weight))
        local = torch.where(here, local, 0)
        chosen = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
        log_sum = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(log_sum)
        ctx.rows = max(LEAST_ROWS, chunk_bytes // (4 * max(1, len(weight))))
        head = _ChunkedHead(weight, bias, min(ctx.rows, len(hidden)))
        all_logs = torch.empty_like(head.logits)
        for rows in _chunks(len(hidden), ctx.rows):
            logits = transform(head(hidden[rows]))
            if temperatures is not None:
                logits /= temperatures[rows, None]
            # torch's fused kernel, whose result also tells the normaliser, takes a third of the time of logsumexp.
            logs = torch.log_softmax(logits, -1, out=all_logs[: len(logits)])
            log_sum[rows] = logits[:, 0] - logs[:, 0]
            chosen[rows] = torch.where(here[rows], logits.gather(1, local[rows]), 0.0)
            if with_entropy:
                entropy[rows] = -torch.linalg.vecdot(logits.copy_(logs).exp_(), logs)
        if share is not None:
            log_sum, entropy = _join(log_sum, entropy, chosen, share.group)
        ctx.with_entropy = with_entropy
        ctx.save_for_backward(hidden, weight, bias, temperatures, local, counts, here, log_sum, entropy)
        ctx.transform = transform
        return torch.where(counts, chosen - log_sum[:, None], 0.0), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, temperatures, local, counts, here, log_sum, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads
        by_target = torch.where(here, by_logprob, 0.0)
        by_all = torch.where(counts, by_logprob, 0.0).sum(1)
        by_hidden = torch.empty_like(hidden)
        # Half precision would lose what each of many chunks adds.
        by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        by_bias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        head = _ChunkedHead(weight, bias, min(ctx.rows, len(hidden)))
        for rows in _chunks(len(hidden), ctx.rows):
            transformed = ctx.transform(head(hidden[rows]))
            logs = transformed.clone() if ctx.transform.softcap is not None else transformed
            if temperatures is not None:
                logs /= temperatures[rows, None]
            logs -= log_sum[rows, None]
            slope = torch.exp(logs) if ctx.with_entropy else logs.exp_()
            if ctx.with_entropy:
                slope *= logs.add_(entropy[rows, None]).mul_(-by_entropy[rows, None]).sub_(by_all[rows, None])
            else:
                slope *= -by_all[rows, None]
            slope.scatter_add_(1, local[rows], by_target[rows])
            if temperatures is not None:
                slope /= temperatures[rows, None]
            by_logits = ctx.transform.times_slope(slope, transformed)
            if by_bias is not None:
                by_bias += by_logits.sum(0)
            by_logits = by_logits.to(hidden.dtype)
            torch.mm(by_logits, weight, out=by_hidden[rows])
            if weight.dtype == torch.float32:
                by_weight.addmm_(by_logits.T, hidden[rows])
            else:
                by_weight += by_logits.T @ hidden[rows]
        return (
            by_hidden,
            by_weight.to(weight.dtype),
            None if bias is None or by_bias is None else by_bias.to(bias.dtype),
            *[None] * 6,
        )


def _chunks(rows: int, most: int) -> Iterator[slice]:
    """`rows` rows in slices of at most `most`."""
    return (slice(start, start + most) for start in range(0, rows, most))


class _ChunkedHead:
    """Logits of a chunk, in memory that all chunks share: to allocate it anew would take as long as half a product on a CPU.

    Args:
        weight: [vocabulary, width].
        bias: [vocabulary], or None.
        rows: Most tokens of a chunk.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        self._weight, self._bias = weight, bias
        shape = (rows, len(weight))
        self.logits = torch.empty(shape, dtype=torch.float32, device=weight.device)
        half = weight.dtype != torch.float32
        self._product = torch.empty(shape, dtype=weight.dtype, device=weight.device) if half else self.logits

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary], to be overwritten by the next call."""
        product, logits = self._product[: len(hidden)], self.logits[: len(hidden)]
        if self._bias is None:
            torch.mm(hidden, self._weight.T, out=product)
        else:
            torch.addmm(self._bias, hidden, self._weight.T, out=product)
        return logits if self._product is self.logits else logits.copy_(product)


def _join(
    log_sum: torch.Tensor, entropy: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalisers and entropies over the whole vocabulary, from those over each rank's rows; completes `chosen` in place."""
    highest = log_sum.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    below = log_sum - highest
    weights = torch.exp(below)
    sums = torch.cat([weights[:, None], (weights * (entropy - below))[:, None], chosen], dim=1)
    dist.all_reduce(sums, group=group)
    chosen.copy_(sums[:, 2:])
    log_weights = sums[:, 0].log()
    return highest + log_weights, sums[:, 1] / sums[:, 0] + log_weights
