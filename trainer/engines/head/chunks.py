"""The head computed with torch, on any device, in chunks over tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .terms import Gradients, HeadTerms, LogitSums, LossSlopes
from .top_tokens import best_keys

CHUNK_BYTES = 128 * 2**20
"""Most bytes of the float32 logits of a chunk; a chunk has at least `LEAST_ROWS` tokens."""
LEAST_ROWS = 64


def forward(
    terms: HeadTerms, labels: torch.Tensor, *, entropy: bool, top_k: int, first: int, chunk_bytes: int
) -> LogitSums:
    """Compute sums over logits, of which only one chunk exists at a time.

    `labels`, int64 [rows, labels], are rows of the head's weight, or -1 for none; the weight's first row is that of token
    `first`. Entropies cost another pass over the logits, and the keys of the `top_k` largest ones take twice the memory of a
    chunk.
    """
    hidden, temperatures = terms.hidden, terms.temperatures
    chosen = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    log_sum = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    entropies = torch.zeros_like(log_sum)
    best = torch.empty((len(hidden), top_k), dtype=torch.int64, device=hidden.device)
    head = _ChunkedHead(terms, chunk_bytes)
    all_logs = torch.empty_like(head.logits)
    for rows in head.chunks():
        logits = terms.transform(head(rows))
        if temperatures is not None:
            logits /= temperatures[rows, None]
        if top_k:
            best[rows] = best_keys(logits, top_k, first)
        # torch's fused kernel takes a third of the time of logsumexp, and the normaliser follows from its result.
        logs = torch.log_softmax(logits, -1, out=all_logs[: len(logits)])
        log_sum[rows] = logits[:, 0] - logs[:, 0]
        here = labels[rows]
        chosen[rows] = torch.where(here >= 0, logits.gather(1, here.clamp(min=0)), 0.0)
        if entropy:
            entropies[rows] = -torch.linalg.vecdot(logits.copy_(logs).exp_(), logs)
    return LogitSums(log_sum, entropies, chosen, best)


def backward(terms: HeadTerms, slopes: LossSlopes, wanted: tuple[bool, bool, bool], chunk_bytes: int) -> Gradients:
    """Recompute logits, a chunk at a time, and from them the `wanted` gradients: by hidden, weight and bias."""
    hidden, weight, temperatures = terms.hidden, terms.weight, terms.temperatures
    by_hidden = torch.empty_like(hidden) if wanted[0] else None
    # In half precision, the sum would lose the small contribution of each of many chunks.
    by_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None
    by_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wanted[2] else None
    head = _ChunkedHead(terms, chunk_bytes)
    for rows in head.chunks():
        transformed = terms.transform(head(rows))
        logs = transformed.clone() if terms.transform.softcap is not None else transformed
        if temperatures is not None:
            logs /= temperatures[rows, None]
        logs -= slopes.log_sum[rows, None]
        if slopes.by_entropy is not None:
            slope = torch.exp(logs)
            logs += slopes.entropy[rows, None]
            slope *= logs.mul_(-slopes.by_entropy[rows, None]).sub_(slopes.by_all[rows, None])
        else:
            slope = logs.exp_().mul_(-slopes.by_all[rows, None])
        slope.scatter_add_(1, slopes.labels[rows].clamp(min=0), slopes.by_label[rows])
        if temperatures is not None:
            slope /= temperatures[rows, None]
        by_logits = terms.transform.times_slope(slope, transformed)
        if by_bias is not None:
            by_bias += by_logits.sum(0)
        by_logits = by_logits.to(hidden.dtype)
        if by_hidden is not None:
            torch.mm(by_logits, weight, out=by_hidden[rows])
        if by_weight is not None and weight.dtype == torch.float32:
            by_weight.addmm_(by_logits.T, hidden[rows])
        elif by_weight is not None:
            by_weight += by_logits.T @ hidden[rows]
    return by_hidden, by_weight, by_bias


class _ChunkedHead:
    """Logits of one chunk, in memory that all chunks reuse: allocating it for each takes as long as half a product on a CPU."""

    def __init__(self, terms: HeadTerms, chunk_bytes: int) -> None:
        self._terms = terms
        weight = terms.weight
        self._rows = max(LEAST_ROWS, chunk_bytes // (4 * max(1, len(weight))))
        shape = (min(self._rows, len(terms.hidden)), len(weight))
        self.logits = torch.empty(shape, dtype=torch.float32, device=weight.device)
        half = weight.dtype != torch.float32
        self._product = torch.empty(shape, dtype=weight.dtype, device=weight.device) if half else self.logits

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        return (slice(start, start + self._rows) for start in range(0, len(self._terms.hidden), self._rows))

    def __call__(self, rows: slice) -> torch.Tensor:
        """Return the logits of `rows`, float32 [rows, vocabulary]. The next call overwrites them."""
        hidden, weight, bias = self._terms.hidden[rows], self._terms.weight, self._terms.bias
        product, logits = self._product[: len(hidden)], self.logits[: len(hidden)]
        if bias is None:
            torch.mm(hidden, weight.T, out=product)
        else:
            torch.addmm(bias, hidden, weight.T, out=product)
        return logits if self._product is self.logits else logits.copy_(product)
