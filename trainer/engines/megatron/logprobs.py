"""Token log-probabilities where each rank holds the logits of a part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    first: int,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """`token_logprobs` over a vocabulary that the ranks of `group` share. Collective; float32 throughout.

    Args:
        logits: [batch, positions, local vocabulary], any floating dtype; a rank's own tokens, padding among them.
        targets: int64 [batch, positions], as in the whole vocabulary.
        first: the token that this rank's first logit belongs to.
        vocab: tokens of the whole vocabulary; logits of tokens from here on are padding and count for nothing.
        temperature: the sampling temperature of the rollout.
        group: the ranks that share the vocabulary.

    Returns:
        float32 [batch, positions], the same on every rank of `group`.
    """
    out: torch.Tensor = _VocabParallelLogprobs.apply(logits, targets, first, vocab, temperature, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


class _VocabParallelLogprobs(torch.autograd.Function):
    """The derivative by a logit is ``(is_target - probability) / temperature``, so the probabilities are what is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first: int,
        vocab: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        scaled = logits.float() / temperature
        scaled[..., max(vocab - first, 0) :] = -torch.inf
        highest = scaled.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        scaled -= highest.unsqueeze(-1)
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(mine, local, 0)
        chosen = torch.where(mine, scaled.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0.0)
        probabilities = scaled.exp_()
        sums = torch.stack([probabilities.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        total, chosen = sums.unbind()
        probabilities /= total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, local, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, local, mine = ctx.saved_tensors
        slope = -probabilities
        slope.scatter_add_(-1, local.unsqueeze(-1), mine.float().unsqueeze(-1))
        slope *= grads[0].unsqueeze(-1) / ctx.temperature
        return slope.to(ctx.dtype), None, None, None, None, None
