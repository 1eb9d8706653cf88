"""The head computed with Triton programs, on CUDA devices.

Forward, programs go over blocks of the vocabulary and keep sums and the largest logits of each row in registers; no other logit
is written to memory.
Backward, the vocabulary is processed in parts that fit a buffer. One program per block writes the gradient by logits into it, in
the dtype of the inputs. One product over all rows then gives the final gradient of that part of the weight; the products for the
gradient by hidden states are added up in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from weightlane.ckpt_engines.runtime.devices import runtime_of

from .terms import Gradients, HeadTerms, LogitSums, LossSlopes

_GROUP = 8
"""Blocks of rows whose programs run at the same time: with 128 rows of 4096 half-precision numbers each, 8 MiB of the cache."""
_PROGRAMS = 1024
"""About how many programs the forward pass is split into: several for each multiprocessor of any device."""
_MOST_KEPT = 128
"""How many tokens of each row a program keeps at a time: with twice as many, the loop that multiplies runs out of registers.

The keys of all programs take at most 128 MiB, or 1 KiB per row if that is more.
"""
_HALF: dict[str, Any] = {
    "BLOCK_ROWS": 128,
    "BLOCK_COLUMNS": 128,
    "BLOCK_WIDTH": 64,
    "GROUP": _GROUP,
    "PRECISION": "ieee",
    "num_warps": 8,
    "num_stages": 3,
}
_SINGLE = _HALF | {"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "BLOCK_WIDTH": 32, "num_warps": 4}
DTYPES: dict[torch.dtype, dict[str, Any]] = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _SINGLE}
"""The sizes of a program's blocks for each dtype of hidden states and weight."""


@cache
def kernels() -> Any:
    """Return the module of the Triton programs; None if Triton is not installed."""
    try:
        from . import triton_kernels  # noqa: PLC0415 - importing Triton takes a second, and few need it
    except ImportError:
        return None
    return triton_kernels


def forward(
    terms: HeadTerms,
    labels: torch.Tensor,
    *,
    entropy: bool,
    top_k: int,
    first: int,
    chunk_bytes: int,  # noqa: ARG001 - no chunk of logits is in memory
) -> LogitSums:
    """Compute sums over logits; arguments are those of `chunks.forward`.

    For each `_MOST_KEPT` of the `top_k` tokens that are wanted, the programs go over the vocabulary once.
    """
    rows, vocabulary = len(terms.hidden), len(terms.weight)
    device = terms.hidden.device
    chosen = torch.zeros(labels.shape, dtype=torch.float32, device=device)
    if not rows:
        nothing = torch.zeros(0, dtype=torch.float32, device=device)
        return LogitSums(nothing, nothing.clone(), chosen, torch.empty((0, top_k), dtype=torch.int64, device=device))
    terms = _row_major(terms)
    blocks = DTYPES[terms.hidden.dtype]
    row_blocks = -(-rows // blocks["BLOCK_ROWS"])
    vocabulary_blocks = -(-vocabulary // blocks["BLOCK_COLUMNS"])
    per_split = -(-vocabulary_blocks // max(1, _PROGRAMS // row_blocks))
    splits = -(-vocabulary_blocks // per_split)
    log_sums = torch.empty((splits, rows), dtype=torch.float32, device=device)
    entropies = torch.empty_like(log_sums) if entropy else None
    best = [torch.empty((rows, 0), dtype=torch.int64, device=device)]
    # Keys that are found already are not below these. The next pass computes equal logits, although its program is another one:
    # no product in them is followed by a sum, with which a compiler could fuse it.
    bounds = None
    for start in range(0, max(1, top_k), _MOST_KEPT):
        count = min(top_k - start, _MOST_KEPT)
        keys = torch.empty((rows, splits, count), dtype=torch.int64, device=device) if count else None
        with runtime_of(device).current():  # Triton launches on the current device, wherever its arguments are
            kernels().sums_kernel[(row_blocks * splits,)](
                terms.hidden,
                terms.weight,
                terms.bias,
                terms.temperatures,
                labels.int(),
                bounds,
                log_sums,
                entropies,
                chosen,
                keys,
                rows,
                vocabulary,
                terms.hidden.shape[1],
                labels.shape[1],
                count,
                first,
                *_last_arguments(terms),
                splits,
                per_split,
                SLOTS=kernels().triton.next_power_of_2(count),
                **blocks,
            )
        if keys is not None:
            best.append(keys.flatten(1).topk(count).values)
            bounds = best[-1][:, -1].contiguous()
    return LogitSums(*_joined(log_sums, entropies), chosen, torch.cat(best, 1))


def backward(terms: HeadTerms, slopes: LossSlopes, wanted: tuple[bool, bool, bool], chunk_bytes: int) -> Gradients:
    """Recompute logits, and from them the `wanted` gradients: by hidden, weight and bias."""
    terms = _row_major(terms)
    hidden, weight, bias = terms.hidden, terms.weight, terms.bias
    rows, vocabulary = len(hidden), len(weight)
    by_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if wanted[0] else None
    by_weight = torch.empty_like(weight) if wanted[1] else None
    by_bias = torch.empty(vocabulary, dtype=torch.float32, device=weight.device) if wanted[2] else None
    if not rows:
        for empty in (by_weight, by_bias):
            if empty is not None:
                empty.zero_()
        return by_hidden, by_weight, by_bias
    blocks = DTYPES[hidden.dtype]
    columns = max(1, chunk_bytes // (rows * hidden.itemsize * blocks["BLOCK_COLUMNS"])) * blocks["BLOCK_COLUMNS"]
    buffer = torch.empty(rows * min(columns, vocabulary), dtype=hidden.dtype, device=hidden.device)
    contiguous = [each.contiguous() for each in (slopes.log_sum, slopes.by_label, slopes.by_all)]
    by_entropy = None if slopes.by_entropy is None else slopes.by_entropy.contiguous()
    for start in range(0, vocabulary, columns):
        part = slice(start, min(start + columns, vocabulary))
        count = part.stop - start
        by_logits = buffer[: rows * count].view(rows, count)
        programs = -(-rows // blocks["BLOCK_ROWS"]) * -(-count // blocks["BLOCK_COLUMNS"])
        with runtime_of(hidden.device).current():
            kernels().slopes_kernel[(programs,)](
                hidden,
                weight[part],
                None if bias is None else bias[part],
                terms.temperatures,
                (slopes.labels - start).int(),
                contiguous[0],
                None if by_entropy is None else slopes.entropy.contiguous(),
                contiguous[1],
                contiguous[2],
                by_entropy,
                by_logits,
                rows,
                count,
                hidden.shape[1],
                slopes.labels.shape[1],
                *_last_arguments(terms),
                **blocks,
            )
        if by_hidden is not None:
            _add_product(by_hidden, by_logits, weight[part])
        if by_weight is not None:
            torch.mm(by_logits.T, hidden, out=by_weight[part])
        if by_bias is not None:
            torch.sum(by_logits, 0, dtype=torch.float32, out=by_bias[part])
    return by_hidden, by_weight, by_bias


def _row_major(terms: HeadTerms) -> HeadTerms:
    """Return `terms` with each row's elements contiguous, as programs read them."""
    hidden, weight, bias, temperatures = terms.hidden, terms.weight, terms.bias, terms.temperatures
    return HeadTerms(
        hidden if hidden.stride(1) == 1 else hidden.contiguous(),
        weight if weight.stride(1) == 1 else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        None if temperatures is None else temperatures.contiguous(),
        terms.transform,
    )


def _last_arguments(terms: HeadTerms) -> tuple[Any, ...]:
    """Return strides, scale and soft cap, the last arguments of all programs, in their order."""
    softcap = terms.transform.softcap
    strides = terms.hidden.stride(0), terms.weight.stride(0)
    return *strides, float(terms.transform.scale), None if softcap is None else float(softcap)


def _joined(log_sums: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine normalisers and entropies of the splits, float32 [splits, rows] each, into those of all: float32 [rows] each."""
    log_sum = torch.logsumexp(log_sums, 0)
    if entropies is None:
        return log_sum, torch.zeros_like(log_sum)
    # The log of each split's probability; the total entropy is that within the splits plus that between them.
    log_shares = log_sums - log_sum
    return log_sum, (log_shares.exp() * (entropies - log_shares)).sum(0)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to `total`, which is float32; no product is rounded to half precision first."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)
