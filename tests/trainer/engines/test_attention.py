"""Packed attention: what each token sees, where prefixes are shared, and torch's kernel for sequences of different lengths."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from weightlane.trainer.data.packing import balanced_blocks
from weightlane.trainer.engines import attention

LENGTHS = (1, 37, 5, 64)
OFFSETS = torch.tensor([0, 1, 38, 43, 107])
BOUNDS = list(itertools.pairwise(OFFSETS.tolist()))
SEGMENTS = attention.Segments(BOUNDS, (), OFFSETS.device)


TREE = [(0, 12), (12, 13), (13, 20), (20, 27), (27, 47), (47, 52), (52, 55), (55, 59), (59, 61)]
PREFIXES = [(0, 0), (0, 12), (0, 12), (0, 12), (0, 12), (0, 0), (0, 0), (52, 55), (52, 55)]
"""A prefix of 12 tokens with segments of 1, 7, 7 and 20 tokens, a sequence by itself, and a prefix of 3 tokens."""


def written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    runs: Sequence[tuple[int, int]] = tuple(itertools.pairwise(OFFSETS.tolist())),
    prefixes: Sequence[tuple[int, int]] = (),
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence alone, its prefix included, with whole matrices."""
    repeats, parts = q.shape[1] // k.shape[1], []
    k, v = (each.repeat_interleave(repeats, 1) for each in (k, v))
    for (start, stop), (first, last) in zip(runs, prefixes or [(0, 0)] * len(runs), strict=True):
        query, key, value = (torch.cat([each[first:last], each[start:stop]]) for each in (q, k, v))
        ones = torch.ones(len(query), len(query), dtype=torch.bool, device=q.device)
        seen = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(query), 1)], 2)
        weights = scores.softmax(-1)[..., : len(query)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, value)[last - first :])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 1e-12), ({"softcap": 1.5}, 1e-6), ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]).double()}, 1e-6)],
    ids=["plain", "softcap", "sinks"],
)
def test_a_token_sees_its_prefix_and_its_own_segment_as_if_these_were_a_sequence(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: float
) -> None:
    """The gradient of a prefix is the sum of those of its segments. With options, weights are computed in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(61, heads, width) for heads, width in ((4, 8), (2, 8), (2, 6), (4, 6))]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for window, copies in itertools.product((None, 1, 2, 5, 13, 100), (0, 100)):
        monkeypatch.setattr(attention, "_MOST_COPIES", copies)  # computed again in the backward pass, or kept
        mine, wanted = ([each.clone().requires_grad_() for each in drawn[:3]] for _ in range(2))
        segments = attention.Segments(TREE, PREFIXES, torch.device("cpu"))
        found = attention.packed_attention(*mine, segments, scale=0.7, window=window, **options)
        exact = written_out(*wanted, 0.7, window, TREE, PREFIXES, **options)
        for each in (found, exact):
            each.backward(drawn[3])
        torch.testing.assert_close(found, exact, rtol=limit, atol=limit)
        for here, there in zip(mine, wanted, strict=True):
            torch.testing.assert_close(here.grad, there.grad, rtol=limit, atol=limit)


class OfAllRanks:
    """Keys and values of all tokens, as the ranks that share them gather them."""

    def __init__(self, order: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.order, places = order, order.argsort()
        self._both = tuple(torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 99))[places] for each in (key, value))

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del key, value
        return self._both


def test_ranks_that_share_tokens_see_from_their_part_what_one_rank_sees() -> None:
    """In batches, and with the kernel, of which one exists on GPUs only. Each rank also has padding behind all tokens."""
    q, k, v = (torch.randn(61, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    segments = attention.Segments(TREE, PREFIXES, torch.device("cpu"))
    for window, ranks in itertools.product((None, 1, 5), (2, 3, 8)):
        wanted, found = written_out(q, k, v, 0.3, window, TREE, PREFIXES), torch.full_like(q, torch.nan)
        blocks = balanced_blocks(segments.costs(), ranks)
        held = [torch.cat([torch.arange(*block) for block in each]) for each in blocks]
        assert len({len(each) for each in held}) == 1, "every rank has as many tokens"
        keys = OfAllRanks(torch.cat(held).argsort(), k, v)
        for bounds, mine in zip(blocks, held, strict=True):
            part, real = segments.part(bounds, keys), mine < 61
            query = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 99))[mine]
            out = attention.packed_attention(query, query[:, :2], query[:, :2], part, scale=0.3, window=window)
            found[mine[real]] = out[real]
            whole = keys.gathered(query, query)
            by_kernel = attention._by_kernel(kernel_of("2.12"), True, query, *whole, part.runs(window), 0.3, window)
            torch.testing.assert_close(by_kernel[real], out[real])
        torch.testing.assert_close(found, wanted)


def test_ranks_that_share_tokens_have_as_many_of_them_and_about_as_much_to_see() -> None:
    assert balanced_blocks(torch.arange(1, 801), 4) == [
        [(0, 100), (700, 800)],
        [(100, 200), (600, 700)],
        [(200, 300), (500, 600)],
        [(300, 500)],
    ], "of one long sequence an early and a late block each"
    mixed = torch.cat([torch.arange(1, 4001), *[torch.arange(1, 41)] * 100])
    for costs, ranks in ((mixed, 2), (mixed, 4), (torch.ones(5, dtype=torch.int64), 4), (torch.ones(1), 2)):
        found = balanced_blocks(costs, ranks)
        tokens = [{token for block in blocks for token in range(*block)} for blocks in found]
        assert len({len(each) for each in tokens}) == 1
        assert set(range(len(costs))) <= set.union(*tokens)
        assert sum(map(len, tokens)) == len(set.union(*tokens)) < len(costs) + 8 * ranks
        if costs is mixed:
            loads = [sum(int(costs[token]) for token in each if token < len(costs)) for each in tokens]
            assert max(loads) <= 1.05 * sum(loads) / ranks


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_computes_attention_and_its_gradients() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for groups, window, dtype in itertools.product((4, 2, 1), (None, 8), (torch.bfloat16, torch.float16)):
        generator = torch.Generator().manual_seed(0)
        shapes = [(sum(LENGTHS), heads, 64) for heads in (4, groups, groups, 4)]
        q, k, v, slope = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        exact = [each.double().requires_grad_() for each in (q, k, v)]
        wanted = written_out(*exact, scale=0.2, window=window)
        wanted.backward(slope.double())
        on_gpu = [each.cuda().requires_grad_() for each in (q, k, v)]
        found = attention.packed_attention(
            *on_gpu, attention.Segments(BOUNDS, (), torch.device("cuda")), scale=0.2, window=window
        )
        found.backward(slope.cuda())
        pairs = [(found, wanted), *((here.grad, there.grad) for here, there in zip(on_gpu, exact, strict=True))]
        for here, there in pairs:
            assert here is not None
            assert there is not None
            off = (here.detach().cpu().double() - there.detach()).norm() / there.norm()
            assert off < 0.01, f"off by {off:.2g} with {groups} groups, a window of {window}, {dtype}"


def kernel_of(torch_version: str) -> Callable[..., Any]:
    """A kernel that takes what that of a version of torch takes, and attends by `written_out`."""

    def attend(q: Any, k: Any, v: Any, runs: Any, window: tuple[int, int], scale: float | None) -> torch.Tensor:
        """Queries are the last of their keys, as in flash attention."""
        starts, key_starts, longest, longest_keys = runs
        assert (starts.dtype, key_starts.dtype, window[1]) == (torch.int32, torch.int32, 0)
        assert (longest, longest_keys) == (int(starts.diff().max()), int(key_starts.diff().max()))
        parts = []
        bounds = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
        for (start, stop), (first, last) in bounds:
            query = torch.cat([q.new_zeros(last - first - (stop - start), *q.shape[1:]), q[start:stop]])
            size = None if window[0] < 0 else window[0] + 1
            alone = written_out(query, k[first:last], v[first:last], scale or 0, size, [(0, last - first)])
            parts.append(alone[len(query) - (stop - start) :])
        return torch.cat(parts)

    def in_2_10(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool) -> None:
        raise AssertionError("it knows no window and no scale")

    def in_2_11(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                return_aux: None = None, scale: Any = None, window_size: Any = (-1, -1)) -> torch.Tensor:  # fmt: skip
        assert q.shape[1] == k.shape[1]
        return attend(q, k, v, (cu_seq_q, cu_seq_k, max_q, max_k), window_size, scale)

    def in_2_12(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, return_aux: None = None,
                scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return attend(q, k, v, (cu_seq_q, cu_seq_k, max_q, max_k), window_size, scale)

    return {"2.10": in_2_10, "2.11": in_2_11, "2.12": in_2_12}[torch_version]


def test_each_version_of_torch_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for version, has in (("2.9", False), ("2.10", False), ("2.11", True), ("2.12", True)):
        module = types.SimpleNamespace(varlen_attn=kernel_of(version)) if version != "2.9" else None
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)  # type: ignore[arg-type]
        found = attention.varlen_kernel.__wrapped__()
        assert (found is not None) == has, version
        for window in (None, 3) if found else ():
            for key, value in ((k, v), (torch.cat([k, k], 1), torch.cat([v, v], 1))):
                mine = attention._by_kernel(*found, q, key, value, SEGMENTS.runs(window), 0.3, window)
                torch.testing.assert_close(mine, written_out(q, key, value, 0.3, window))
                elsewhere = attention.packed_attention(q, key, value, SEGMENTS, scale=0.3, window=window)
                torch.testing.assert_close(mine, elsewhere)
                runs = attention.Segments(TREE, PREFIXES, torch.device("cpu")).runs(window)
                shared = attention._by_kernel(*found, q[:61], key[:61], value[:61], runs, 0.3, window)
                wanted = written_out(q[:61], key[:61], value[:61], 0.3, window, TREE, PREFIXES)
                torch.testing.assert_close(shared, wanted)
    monkeypatch.undo()
    assert attention.varlen_kernel.__wrapped__() is not None, "this torch takes something else: look at it"
