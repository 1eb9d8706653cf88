"""Packed attention by torch's kernel for sequences of different lengths: which versions have it, and what it computes."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightlane.trainer.engines import attention

LENGTHS = (1, 37, 5, 64)
OFFSETS = torch.tensor([0, 1, 38, 43, 107])


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal attention of each sequence alone, with whole matrices."""
    shared, parts = q.shape[1] // k.shape[1], []
    repeated = [q, *(each.repeat_interleave(shared, 1) for each in (k, v))]
    for query, key, value in zip(*(each.split(LENGTHS) for each in repeated), strict=True):
        ones = torch.ones(len(query), len(query), dtype=torch.bool, device=q.device)
        seen = ones.tril() if window is None else ones.tril() & ones.triu(1 - window)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
    return torch.cat(parts)


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
        found = attention.packed_attention(*on_gpu, OFFSETS.cuda(), scale=0.2, window=window)
        found.backward(slope.cuda())
        pairs = [(found, wanted), *((here.grad, there.grad) for here, there in zip(on_gpu, exact, strict=True))]
        for here, there in pairs:
            assert here is not None
            assert there is not None
            off = (here.detach().cpu().double() - there.detach()).norm() / there.norm()
            assert off < 0.01, f"off by {off:.2g} with {groups} groups, a window of {window}, {dtype}"


def kernel_of(torch_version: str) -> Callable[..., Any]:
    """A kernel that takes what that of a version of torch takes, and attends by `written_out`."""

    def attend(q: Any, k: Any, v: Any, starts: Any, window: tuple[int, int], scale: float | None) -> torch.Tensor:
        assert (starts.dtype, window[1]) == (torch.int32, 0)
        return written_out(q, k, v, scale or 0, None if window[0] < 0 else window[0] + 1)

    def in_2_10(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool) -> None:
        raise AssertionError("it knows no window and no scale")

    def in_2_11(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                return_aux: None = None, scale: Any = None, window_size: Any = (-1, -1)) -> torch.Tensor:  # fmt: skip
        assert q.shape == k.shape
        return attend(q, k, v, cu_seq_q, window_size, scale)

    def in_2_12(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, return_aux: None = None,
                scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
        assert enable_gqa == (q.shape != k.shape)
        return attend(q, k, v, cu_seq_q, window_size, scale)

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
                mine = attention._by_kernel(*found, q, key, value, OFFSETS, 0.3, window)
                torch.testing.assert_close(mine, written_out(q, key, value, 0.3, window))
                elsewhere = attention.packed_attention(q, key, value, OFFSETS, scale=0.3, window=window)
                torch.testing.assert_close(mine, elsewhere)
    monkeypatch.undo()
    offsets = OFFSETS.clone()
    assert attention._bounds(offsets)[0] is attention._bounds(offsets)[0], "the device is asked once for all layers"
    del offsets
    assert len(attention._known_bounds) <= 1, "that of OFFSETS"
    assert attention.varlen_kernel.__wrapped__() is not None, "this torch takes something else: look at it"
