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
    def compact_kernel(old, new, ends, positions, flips, size, BLOCK: tl.constexpr):  # noqa: N803
        """Write positions (int64) and flips of differing elements; `ends` is the running total of the counts."""
        block = tl.program_id(0).to(tl.int64)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        flipped = tl.load(old + at, mask=inside, other=0) ^ tl.load(new + at, mask=inside, other=0)
        differ = flipped != 0
        rank = tl.cumsum(differ.to(tl.int32), 0)
        first = tl.load(ends + block) - tl.sum(differ.to(tl.int32), 0)
        place = first + rank - 1
        tl.store(positions + place, at, mask=differ)
        tl.store(flips + place, flipped, mask=differ)

    @triton.jit
    def flip_kernel(target, positions, flips, size, BLOCK: tl.constexpr):  # noqa: N803
        """Flip bits of the elements at positions (int32 or int64)."""
        entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = entry < size
        at = tl.load(positions + entry, mask=inside, other=0).to(tl.int64)
        before = tl.load(target + at, mask=inside, other=0)
        tl.store(target + at, before ^ tl.load(flips + entry, mask=inside, other=0), mask=inside)
