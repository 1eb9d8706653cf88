"""`head_outputs`: the head's outputs with gradient, computed with Triton on CUDA devices and with torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...data.sequences import IGNORED
from . import chunks, cuda_kernels
from .chunks import CHUNK_BYTES
from .terms import HeadTerms, LogitSums, LogitTransform, LossSlopes, VocabularyShare
from .top_tokens import best_of_all, unpacked


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """The outputs of the head for chosen positions, in nats."""

    logprobs: torch.Tensor
    """float32, of the shape of the targets, with gradient; 0 where those are `IGNORED`."""
    entropy: torch.Tensor
    """float32 [rows], with gradient; zeros if it was not asked for."""
    top_tokens: torch.Tensor
    """int64 [rows, k], the most probable first; of equally probable tokens, the lower first."""
    top_logprobs: torch.Tensor
    """float32 [rows, k], their log-probabilities, without gradient."""


def head_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    entropy: bool = False,
    top_k: int = 0,
    bias: torch.Tensor | None = None,
    temperatures: torch.Tensor | None = None,
    transform: LogitTransform | None = None,
    share: VocabularyShare | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> HeadOutputs:
    """Compute log-probabilities of targets, entropies of the predicted distributions, and the most probable tokens.

    Args:
        hidden: [rows, width], the head's input, any floating dtype.
        weight: [vocabulary, width] in the same dtype, without padding; with `share`, this rank's rows of it.
        targets: int64 [rows] or [rows, labels], each a token of the full vocabulary or `IGNORED`.
        entropy: Whether entropies are wanted; on a CPU they cost another pass over the logits.
        top_k: How many of the most probable tokens are wanted, at most all. With Triton the first 128 cost no further product of
            `hidden` and `weight`, and every further 128 cost one.
        bias: [vocabulary], added to logits.
        temperatures: float32 [rows], by which logits are divided.
        transform: The model's transform of logits after its head.
        share: Which rows of the head `weight` has. All ranks of its group call this together, with equal `hidden`. The gradient
            by `hidden` is this rank's part: add it up over the group.
        chunk_bytes: Most bytes of the logits, or of the gradient by logits, that are in memory at a time, see `CHUNK_BYTES`.
    """
    labels = targets if targets.ndim > 1 else targets.unsqueeze(1)
    logprobs, *others = _Head.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden, weight, bias, labels, entropy, top_k, temperatures, transform or LogitTransform(), share, chunk_bytes
    )
    return HeadOutputs(logprobs if targets.ndim > 1 else logprobs.sum(1), *others)  # not a view: FSDP would warn


class _Head(torch.autograd.Function):
    """The head with a gradient of its own: keeps its inputs, normalisers and entropies, and recomputes logits backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        with_entropy: bool,
        top_k: int,
        temperatures: torch.Tensor | None,
        transform: LogitTransform,
        share: VocabularyShare | None,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = labels != IGNORED
        first = share.first if share else 0
        local = labels - first
        local = torch.where(counts & (local >= 0) & (local < len(weight)), local, -1)
        terms = HeadTerms(hidden, weight, bias, temperatures, transform)
        way = cuda_kernels if _by_kernels(hidden) else chunks
        sums: LogitSums = way.forward(
            terms, local, entropy=with_entropy, top_k=top_k, first=first, chunk_bytes=chunk_bytes
        )
        log_sum, entropy, chosen, best = sums.log_sum, sums.entropy, sums.chosen, sums.best
        if share is not None:
            log_sum, joint_entropy = _join(log_sum, entropy, chosen, share.group)
            entropy = joint_entropy if with_entropy else entropy
            best = best_of_all(best, share.group) if top_k else best
        ctx.with_entropy, ctx.transform, ctx.chunk_bytes = with_entropy, transform, chunk_bytes
        ctx.save_for_backward(hidden, weight, bias, temperatures, local, counts, log_sum, entropy)
        tokens, logits = unpacked(best)
        top_logprobs = logits - log_sum[:, None]
        ctx.mark_non_differentiable(tokens, top_logprobs)
        return torch.where(counts, chosen - log_sum[:, None], 0.0), entropy, tokens, top_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, temperatures, local, counts, log_sum, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads[:2]
        slopes = LossSlopes(
            local,
            log_sum,
            entropy,
            torch.where(local >= 0, by_logprob, 0.0),
            torch.where(counts, by_logprob, 0.0).sum(1),
            by_entropy if ctx.with_entropy else None,
        )
        terms = HeadTerms(hidden, weight, bias, temperatures, ctx.transform)
        way = cuda_kernels if _by_kernels(hidden) else chunks
        found = way.backward(terms, slopes, ctx.needs_input_grad[:3], ctx.chunk_bytes)
        inputs = (hidden, weight, bias)
        return *(each if each is None else each.to(to.dtype) for each, to in zip(found, inputs, strict=True)), *[
            None
        ] * 7


def _by_kernels(hidden: torch.Tensor) -> bool:
    """Return whether the Triton programs compute the head on `hidden`."""
    return hidden.is_cuda and hidden.dtype in cuda_kernels.DTYPES and cuda_kernels.kernels() is not None


def _join(
    log_sum: torch.Tensor, entropy: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine each rank's normalisers and entropies into those of the full vocabulary, and complete `chosen` in place."""
    highest = log_sum.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    below = log_sum - highest
    weights = torch.exp(below)
    sums = torch.cat([weights[:, None], (weights * (entropy - below))[:, None], chosen], dim=1)
    dist.all_reduce(sums, group=group)
    chosen.copy_(sums[:, 2:])
    log_weights = sums[:, 0].log()
    return highest + log_weights, sums[:, 1] / sums[:, 0] + log_weights
