"""The Triton programs of the delta codec; imported only when a tensor lies on a CUDA device.

The programs see integers only, because they compare and move bits.
"""

# What Triton compiles cannot be typed as Python, and its package has no types.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator"

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - tests that need it say so
    triton = None

AVAILABLE = triton is not None

BLOCK = 4096
"""Elements per program."""

if AVAILABLE:

    @triton.jit
    def count_kernel(old, new, counts, size, BLOCK: tl.constexpr):  # noqa: N803 - Triton's habit
        """Count the differing elements of each block: `counts` is int32, one per program."""
        block = tl.program_id(0).to(tl.int64)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        differ = tl.load(old + at, mask=inside, other=0) != tl.load(new + at, mask=inside, other=0)
        tl.store(counts + block, tl.sum(differ.to(tl.int32), 0))

    @triton.jit
    def compact_kernel(old, new, ends, positions, values, size, BLOCK: tl.constexpr):  # noqa: N803
        """Write positions (int64) and new values of differing elements; `ends` is the running total of the counts."""
        block = tl.program_id(0).to(tl.int64)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        after = tl.load(new + at, mask=inside, other=0)
        differ = tl.load(old + at, mask=inside, other=0) != after
        rank = tl.cumsum(differ.to(tl.int32), 0)
        first = tl.load(ends + block) - tl.sum(differ.to(tl.int32), 0)
        place = first + rank - 1
        tl.store(positions + place, at, mask=differ)
        tl.store(values + place, after, mask=differ)

    @triton.jit
    def exchange_kernel(target, positions, values, size, BLOCK: tl.constexpr):  # noqa: N803
        """Exchange the elements at positions (int32) with the values."""
        entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = entry < size
        at = tl.load(positions + entry, mask=inside, other=0).to(tl.int64)
        value = tl.load(values + entry, mask=inside, other=0)
        before = tl.load(target + at, mask=inside, other=0)
        tl.store(values + entry, before, mask=inside)
        tl.store(target + at, value, mask=inside)
