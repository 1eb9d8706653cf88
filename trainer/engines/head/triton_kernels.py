"""The Triton programs of the head; imported only when a tensor is on a CUDA device.

Each program computes logits of some tokens for a block of the vocabulary in registers. No two programs write to the same place,
so results do not depend on the order in which they run.
"""

# What Triton compiles cannot be typed as Python, and its package has no types.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from . import top_tokens

_LOW = tl.constexpr(top_tokens.LOW)
_NONE = tl.constexpr(top_tokens.NONE)
_LARGEST_KEY = tl.constexpr(2**63 - 1)
_LEAST = tl.constexpr(-(2**31))
"""Marks a logit that is not to be kept, or is kept already. As a logit it would be a NaN that no arithmetic makes."""


@triton.jit
def _place(row_blocks, parts, GROUP: tl.constexpr):  # noqa: N803 - Triton's habit
    """Return this program's block of rows, and its part of the vocabulary.

    Programs that run at the same time work on the same `GROUP` blocks of rows and the same parts of the vocabulary, so that
    both are read from the cache.
    """
    program = tl.program_id(0)
    first = program // (GROUP * parts) * GROUP
    size = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * parts)
    return first + within % size, within // size


@triton.jit
def _logits(
    hidden,
    weight,
    bias,
    rows,
    row_count,
    columns,
    column_count,
    width,
    hidden_stride,
    weight_stride,
    scale,
    softcap,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_COLUMNS: tl.constexpr,  # noqa: N803
    BLOCK_WIDTH: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Compute float32 logits of `rows` for the tokens `columns`, with bias and transform."""
    at = tl.arange(0, BLOCK_WIDTH)
    row_inside = rows < row_count
    column_inside = columns < column_count
    left = hidden + rows.to(tl.int64)[:, None] * hidden_stride + at[None, :]
    right = weight + columns.to(tl.int64)[None, :] * weight_stride + at[:, None]
    logits = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        inside = at < width - start
        a = tl.load(left, mask=row_inside[:, None] & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None] & column_inside[None, :], other=0.0)
        logits = tl.dot(a, b, logits, input_precision=PRECISION)
        left += BLOCK_WIDTH
        right += BLOCK_WIDTH
    if bias is not None:
        logits += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    logits = logits * scale
    if softcap is not None:
        # tanh written with an exponential that cannot overflow, because Triton's interpreter has no tanh.
        shrunk = tl.exp(-2.0 * tl.abs(logits) / softcap)
        capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
        logits = tl.where(logits < 0, -capped, capped)
    return logits


@triton.jit
def _keys(ordered, tokens):
    """Pack logits, as integers in their order, and their tokens into keys, see `top_tokens`."""
    return (ordered.to(tl.int64) << 32) + (tokens.to(tl.int64) ^ _LOW)


@triton.jit
def _with_larger(kept, logits, inside, token, bounds):
    """Return `kept` (int64 [rows, slots]) with the smallest of each row replaced by larger keys of `logits`.

    `token` is that of the first column. Columns that are not `inside` do not count, nor do keys that are not below their row's
    of `bounds` (int64 [rows], or None). The smallest of `kept` must be unique in its row.
    """
    columns = tl.arange(0, logits.shape[1])
    ordered = logits.to(tl.int32, bitcast=True)
    ordered ^= (ordered >> 31) & 0x7FFFFFFF
    ordered = tl.where(ordered == -1, 0, ordered)  # -0.0 becomes 0.0
    ordered = tl.where(inside[None, :], ordered, _LEAST)
    if bounds is not None:
        ordered = tl.where(_keys(ordered, (token + columns)[None, :]) < bounds[:, None], ordered, _LEAST)
    # One key of each row per turn, for as long as some row has one to keep, which is rare after the first blocks.
    replaced = 1
    while replaced > 0:
        largest, column = tl.max(ordered, 1, return_indices=True)  # of equal ones the first: no later one replaces it
        key = tl.where(largest == _LEAST, _NONE, _keys(largest, token + column))
        smallest = tl.min(kept, 1)
        larger = key > smallest
        kept = tl.where(larger[:, None] & (kept == smallest[:, None]), key[:, None], kept)
        ordered = tl.where(columns[None, :] == column[:, None], _LEAST, ordered)
        replaced = tl.max(larger.to(tl.int32), 0)
    return kept


@triton.jit
def sums_kernel(
    hidden,
    weight,
    bias,
    temperatures,
    labels,
    bounds,
    log_sums,
    entropies,
    chosen,
    best,
    row_count,
    column_count,
    width,
    label_count,
    top_k,
    first,
    hidden_stride,
    weight_stride,
    scale,
    softcap,
    splits,
    blocks_per_split,
    SLOTS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_COLUMNS: tl.constexpr,  # noqa: N803
    BLOCK_WIDTH: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Reduce logits of one block of rows over one split of the vocabulary, `blocks_per_split` blocks.

    Writes the logarithm of the sum of exponentials and the entropy, float32 [splits, rows] each; `entropies` may be None.
    Writes the logits of `labels` (int32 [rows, labels], -1 for none) that this split has into `chosen`, of that shape.
    If `best` is not None, writes the split's `top_k` largest keys below `bounds` (int64 [rows], or None) into it, int64
    [rows, splits, k], in any order. `SLOTS` is a power of two that is not below `top_k`.
    """
    row_block, split = _place(tl.cdiv(row_count, BLOCK_ROWS), splits, GROUP)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = rows < row_count
    highest = tl.full((BLOCK_ROWS,), -3.0e38, tl.float32)  # finite, because infinity minus infinity is NaN
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    moment = tl.zeros((BLOCK_ROWS,), tl.float32)
    if best is not None:
        slots = tl.arange(0, SLOTS)
        # Empty slots hold different numbers below all keys, and those beyond `top_k` one that no key replaces.
        empty = tl.where(slots < top_k, slots.to(tl.int64) + _NONE, _LARGEST_KEY)
        kept = tl.broadcast_to(empty[None, :], (BLOCK_ROWS, SLOTS))
        limits = None if bounds is None else tl.load(bounds + rows, mask=row_inside, other=_NONE)
    last = tl.minimum((split + 1) * blocks_per_split, tl.cdiv(column_count, BLOCK_COLUMNS))
    for block in range(split * blocks_per_split, last):
        columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        logits = _logits(
            hidden,
            weight,
            bias,
            rows,
            row_count,
            columns,
            column_count,
            width,
            hidden_stride,
            weight_stride,
            scale,
            softcap,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK_WIDTH,
            PRECISION,
        )
        if temperatures is not None:
            logits = logits / tl.load(temperatures + rows, mask=row_inside, other=1.0)[:, None]
        for number in range(label_count):
            place = rows.to(tl.int64) * label_count + number
            label = tl.load(labels + place, mask=row_inside, other=-1)
            here = (label >= block * BLOCK_COLUMNS) & (label < (block + 1) * BLOCK_COLUMNS)
            if tl.max(here.to(tl.int32), 0) > 0:  # few blocks have a label of these rows
                is_label = label[:, None] == columns[None, :]
                tl.store(chosen + place, tl.sum(tl.where(is_label, logits, 0.0), 1), mask=here)
        logits = tl.where((columns < column_count)[None, :], logits, float("-inf"))
        # With m the highest logit so far, `total` is the sum of exp(z - m), and `moment` that of exp(z - m) (z - m). Unlike
        # the mean of z, they lose no digits to large logits.
        before = highest
        highest = tl.maximum(before, tl.max(logits, 1))
        shrink = tl.exp(before - highest)
        below = logits - highest[:, None]
        weights = tl.exp(below)
        if entropies is not None:
            moment = shrink * (moment + (before - highest) * total)
            moment += tl.sum(tl.where(weights > 0, weights * below, 0.0), 1)
        total = total * shrink + tl.sum(weights, 1)
        if best is not None:
            kept = _with_larger(kept, logits, columns < column_count, first + block * BLOCK_COLUMNS, limits)
    out = split.to(tl.int64) * row_count + rows
    tl.store(log_sums + out, highest + tl.log(total), mask=row_inside)
    if entropies is not None:
        tl.store(entropies + out, tl.log(total) - moment / total, mask=row_inside)
    if best is not None:
        out = ((rows.to(tl.int64) * splits + split) * top_k)[:, None] + slots[None, :]
        kept = tl.where(kept < _NONE + SLOTS, _NONE, kept)
        tl.store(best + out, kept, mask=row_inside[:, None] & (slots < top_k)[None, :])


@triton.jit
def slopes_kernel(
    hidden,
    weight,
    bias,
    temperatures,
    labels,
    log_sums,
    entropies,
    by_label,
    by_all,
    by_entropy,
    slopes,
    row_count,
    column_count,
    width,
    label_count,
    hidden_stride,
    weight_stride,
    scale,
    softcap,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_COLUMNS: tl.constexpr,  # noqa: N803
    BLOCK_WIDTH: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Write a loss's gradient by the head's logits into `slopes`, [rows, columns] in the dtype that the products take.

    The meaning of the inputs is that of `LossSlopes`, over the full vocabulary; `labels` are int32. `by_entropy` may be
    None, and `entropies` with it.
    """
    row_block, block = _place(tl.cdiv(row_count, BLOCK_ROWS), tl.cdiv(column_count, BLOCK_COLUMNS), GROUP)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_inside = rows < row_count
    columns = block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    transformed = _logits(
        hidden,
        weight,
        bias,
        rows,
        row_count,
        columns,
        column_count,
        width,
        hidden_stride,
        weight_stride,
        scale,
        softcap,
        BLOCK_ROWS,
        BLOCK_COLUMNS,
        BLOCK_WIDTH,
        PRECISION,
    )
    logs = transformed
    if temperatures is not None:
        logs = logs / tl.load(temperatures + rows, mask=row_inside, other=1.0)[:, None]
    logs -= tl.load(log_sums + rows, mask=row_inside, other=0.0)[:, None]
    factor = -tl.load(by_all + rows, mask=row_inside, other=0.0)[:, None]
    if by_entropy is not None:
        spread = tl.load(entropies + rows, mask=row_inside, other=0.0)[:, None]
        factor -= tl.load(by_entropy + rows, mask=row_inside, other=0.0)[:, None] * (logs + spread)
    slope = tl.exp(logs) * factor
    for number in range(label_count):
        place = rows.to(tl.int64) * label_count + number
        label = tl.load(labels + place, mask=row_inside, other=-1)
        here = (label >= block * BLOCK_COLUMNS) & (label < (block + 1) * BLOCK_COLUMNS)
        if tl.max(here.to(tl.int32), 0) > 0:
            more = tl.load(by_label + place, mask=row_inside, other=0.0)
            slope += tl.where(label[:, None] == columns[None, :], more[:, None], 0.0)
    if temperatures is not None:
        slope = slope / tl.load(temperatures + rows, mask=row_inside, other=1.0)[:, None]
    if softcap is not None:
        capped = transformed / softcap
        slope = slope * (1.0 - capped * capped)
    out = slopes + rows.to(tl.int64)[:, None] * column_count + columns[None, :]
    inside = row_inside[:, None] & (columns < column_count)[None, :]
    tl.store(out, (slope * scale).to(slopes.dtype.element_ty), mask=inside)
