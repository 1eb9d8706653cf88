"""Causal attention over packed sequences, without a mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

_HALF = (torch.float16, torch.bfloat16)
_WIDTH_STEP, _WIDEST = 8, 256
"""Head widths that torch's kernel takes: multiples of `_WIDTH_STEP`, up to `_WIDEST`."""
_PADDING = 0.25
"""Most padding in a group of sequences, as a share of its tokens; another group would cost the time of some hundred tokens."""


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend within each sequence.

    On a GPU in half precision, torch's variable-length kernel is used (from torch 2.11 on), unless a softcap, sinks, dropout or
    the head widths rule it out. Otherwise sequences of about the same length form groups, padded to their longest sequence.

    Args:
        query: [tokens, heads, width], all sequences one after the other.
        key: [tokens, groups, width], where groups divides heads.
        value: [tokens, groups, value width].
        offsets: int64 [sequences + 1]: where each sequence begins, and the number of tokens.
        scale: Factor of the scores; 1 / sqrt(width) by default.
        window: Number of tokens that each one sees, itself included; None for all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: [heads], one more score in each head's softmax, whose share of the attention is dropped.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        [tokens, heads, value width].
    """
    plain = softcap is None and sinks is None and not dropout
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % _WIDTH_STEP == 0 and width <= _WIDEST
    if plain and fits and query.is_cuda and query.dtype in _HALF and (kernel := varlen_kernel()) is not None:
        return _by_kernel(*kernel, query, key, value, offsets, scale, window)
    shared = query.shape[1] != key.shape[1]
    parts, order = [], []
    for places, real in _groups(offsets):
        length, mask = places.shape[1], None
        q, k, v = (
            tensor.index_select(0, places.flatten()).view(*places.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor in (query, key, value)
        )
        if window is not None and length > window:
            ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
            mask = ones.tril() & ones.triu(1 - window)
        if plain:
            part = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
            )
        else:
            part = _written_out(q, k, v, mask, scale, softcap, sinks, dropout)
        parts.append(part.transpose(1, 2)[real])
        order.append(places[real])
    return torch.cat(parts).index_select(0, torch.cat(order).argsort())


def _groups(offsets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Group sequences of about the same length. Each sequence is in one group.

    Yields:
        int64 [sequences, longest] indices of tokens, and bool of this shape, which is False on padding. Padding is at the end, so
        that no token sees it in causal attention.
    """
    groups: list[list[tuple[int, int]]] = []
    tokens = 0
    for start, end in sorted(pairwise(offsets.tolist()), key=lambda bounds: bounds[0] - bounds[1]):  # longest first
        tokens += end - start
        if groups:
            first, last = groups[-1][0]
            if (len(groups[-1]) + 1) * (last - first) <= (1 + _PADDING) * tokens:
                groups[-1].append((start, end))
                continue
        groups.append([(start, end)])
        tokens = end - start
    for group in groups:
        starts, ends = torch.tensor(group, device=offsets.device).unbind(1)
        places = starts[:, None] + torch.arange(int((ends - starts)[0]), device=offsets.device)
        real = places < ends[:, None]
        yield torch.where(real, places, starts[:, None]), real


@cache
def varlen_kernel() -> tuple[Callable[..., Any], bool] | None:
    """Return torch's ``varlen_attn``, and whether heads can share keys in it (from torch 2.12 on).

    None if it does not take a window and a scale (torch 2.10), or does not exist (torch 2.9).
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in takes) if {"window_size", "scale"} <= takes.keys() else None


_known_bounds: MutableMapping[torch.Tensor, tuple[torch.Tensor, int]] = WeakIdKeyDictionary()
"""Results of `_bounds`, kept since every layer has the same sequences, and reading their lengths makes the host wait."""


def _bounds(offsets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the offsets as torch's kernel takes them, int32, and the length of the longest sequence."""
    if (known := _known_bounds.get(offsets)) is None:
        known = _known_bounds[offsets] = offsets.int(), int(offsets.diff().max())
    return known


def _by_kernel(
    kernel: Callable[..., Any],
    shares_keys: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend with torch's flash attention for sequences of different lengths."""
    starts, longest = _bounds(offsets)
    more: dict[str, Any] = {}
    if (heads := query.shape[1] // key.shape[1]) > 1:
        if shares_keys:
            more["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(heads, 1) for each in (key, value))
    out: torch.Tensor = kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **more,
    )
    return out


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention step by step, for the options that torch's own function lacks.

    Query, key and value are [sequences, heads, length, width].
    """
    repeats, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks.view(1, -1, 1, 1).expand(len(scores), -1, length, 1).to(scores.dtype)
        scores = torch.cat([scores, beside], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :length]
    return functional.dropout(weights, dropout) @ value
