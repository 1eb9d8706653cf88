"""Causal attention over packed sequences, whose prefixes may be shared, without a mask over all tokens."""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .rank_collectives import gathered

Bounds = tuple[int, int]
"""Where a run of tokens begins and ends."""
_HALF = (torch.float16, torch.bfloat16)
_WIDTH_STEP, _WIDEST = 8, 256
"""Head widths that torch's kernel takes: multiples of `_WIDTH_STEP`, up to `_WIDEST`."""
_PADDING = 0.25
"""Most padding in a batch of segments, as a share of its tokens; another batch would cost the time of some hundred tokens."""
_MOST_COPIES = 4
"""Most copied keys that are kept for the backward pass, per token. Beyond, they are copied, and attention is computed, again: it
is a small part of what sharing the prefix saves then."""


class GatheredKeys(NamedTuple):
    """Keys and values of all tokens, of which each of several ranks computes some."""

    order: torch.Tensor
    """int64 [tokens]: where each token's key is among the gathered ones."""
    group: dist.ProcessGroup

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of this rank's tokens with those of the other ranks. Collective."""
        both = gathered(torch.cat([key, value], -1), self.group)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


class _Segment(NamedTuple):
    """A run of tokens that see each other, and what all of them see before."""

    queries: Bounds
    """Where they are among the tokens that attend."""
    own: Bounds
    """Where they are among all tokens: elsewhere only if other ranks compute some of these."""
    before: tuple[Bounds, ...]
    """Runs of tokens that each of them sees: those of a prefix, and those of its sequence that are in another segment."""

    @property
    def seen(self) -> int:
        """Number of tokens before it that it sees."""
        return sum(map(_size, self.before))


class _Batch(NamedTuple):
    """Segments whose prefixes have one length, padded to the longest segment. No token sees the padding, which is at the end."""

    places: torch.Tensor
    """int64 [segments, queries]: the tokens that attend: those of the segments, or those of the prefix before them as well."""
    real: torch.Tensor
    """bool of this shape, False on padding, and on a prefix."""
    keys: torch.Tensor
    """int64 [segments, keys]: the tokens that these see, the prefix first."""
    mask: torch.Tensor | None
    """bool [queries, keys]: which of them each token sees; None where that is itself and all before it."""


class _Runs(NamedTuple):
    """Segments in the form that torch's kernel takes."""

    starts: torch.Tensor
    """int32 [segments + 1]: where each segment begins, and the number of tokens."""
    longest: int
    key_starts: torch.Tensor
    """int32 [segments + 1]: the same for the keys that each segment sees."""
    longest_keys: int
    keys: torch.Tensor | None
    """int64: the places of these keys; None if they are the tokens themselves."""


class Segments:
    """Runs of packed tokens, one after the other. A token sees its segment's prefix, if there is one, and its segment so far.

    A prefix is another run of tokens, which several segments may share. This is no dataclass: FSDP would make a copy for each
    layer, and what is computed once for all layers would be lost.

    Args:
        bounds: Where each segment begins and ends; the first begins at 0.
        prefixes: Where each segment's prefix begins and ends, (0, 0) for none; empty if no segment has one.
        device: The device of the tokens.
    """

    def __init__(self, bounds: Sequence[Bounds], prefixes: Sequence[Bounds], device: torch.device) -> None:
        prefixes = prefixes or [(0, 0)] * len(bounds)
        self._segments = [
            _Segment(each, each, (prefix,) if _size(prefix) else ())
            for each, prefix in zip(bounds, prefixes, strict=True)
        ]
        self.device = device
        """The device of the tokens."""
        self.keys: GatheredKeys | None = None
        """Where keys come from, if this rank computes only some of the tokens."""
        self._batches: dict[int | None, tuple[list[_Batch], torch.Tensor]] = {}
        self._runs: dict[int | None, _Runs] = {}

    def part(self, blocks: Sequence[Bounds], keys: GatheredKeys) -> Segments:
        """Return the segments of the tokens in `blocks`, one after the other, which this rank computes.

        Tokens of a block beyond all segments are padding, and a segment of their own.
        """
        part, stop = Segments((), (), self.device), 0
        part.keys = keys

        def add(own: Bounds, before: tuple[Bounds, ...]) -> None:
            nonlocal stop
            if _size(own) > 0:
                part._segments.append(_Segment((stop, stop + _size(own)), own, before))
                stop += _size(own)

        starts = [each.own[0] for each in self._segments]
        for first, last in blocks:
            for _, own, before in self._segments[max(0, bisect_right(starts, first) - 1) : bisect_left(starts, last)]:
                start = max(first, own[0])
                earlier = ((own[0], start),) if start > own[0] else ()
                add((start, min(last, own[1])), before + earlier)
            add((max(first, self._segments[-1].own[1]), last), ())
        return part

    def costs(self) -> torch.Tensor:
        """Return how many tokens each one sees, itself included: int64 [tokens], on the CPU."""
        return torch.cat([torch.arange(1, _size(each.own) + 1) + each.seen for each in self._segments])

    @cached_property
    def copies(self) -> int:
        """Tokens that segments see before them, each counted for every segment."""
        return sum(each.seen for each in self._segments)

    def batches(self, window: int | None) -> tuple[list[_Batch], torch.Tensor]:
        """Return segments in batches, each in one, and the place of each token among the batches' real tokens: int64 [tokens].

        Segments of a batch are about as long, and their prefixes just as long. A token sees `window` tokens, itself included.
        """
        if window not in self._batches:
            batches = self._made_batches(window)
            order = torch.cat([batch.places[batch.real] for batch in batches])
            self._batches[window] = batches, order.argsort()
        return self._batches[window]

    def runs(self, window: int | None) -> _Runs:
        """Return segments for torch's kernel. A token sees `window` tokens, itself included."""
        if window not in self._runs:
            self._runs[window] = self._made_runs(window)
        return self._runs[window]

    def _within(self, window: int | None) -> list[_Segment]:
        """Return segments that see before them only what at least their first token sees."""
        return [each._replace(before=_last(each.before, window)) for each in self._segments]

    def _made_batches(self, window: int | None) -> list[_Batch]:
        groups: list[list[_Segment]] = []
        tokens = 0
        for each in sorted(self._within(window), key=lambda each: (each.seen, -_size(each.own))):  # longest first
            tokens += _size(each.own)
            last = groups[-1] if groups and groups[-1][0].seen == each.seen else None
            if last and (len(last) + 1) * _size(last[0].own) <= (1 + _PADDING) * tokens:
                last.append(each)
                continue
            groups.append([each])
            tokens = _size(each.own)
        return [self._batch(group, window) for group in groups]

    def _batch(self, group: Sequence[_Segment], window: int | None) -> _Batch:
        before, length = group[0].seen, _size(group[0].own)
        about = torch.tensor([(*each.queries, each.own[0]) for each in group], device=self.device)
        starts, stops, firsts = about[:, :, None].unbind(1)
        steps = torch.arange(length, device=self.device)
        real = steps < stops - starts
        places, keys = (torch.where(real, each + steps, each) for each in (starts, firsts))
        mask = None
        if before:
            runs = torch.stack([_places(each.before) for each in group])
            keys = torch.cat([runs.to(self.device), keys], 1)
        if self.keys is not None:
            keys = self.keys.order[keys]
        elif window is None and 0 < before < length:
            # Under a mask, torch computes all scores, and without one half of them: it is quicker to attend from the prefix, too.
            return _Batch(keys, functional.pad(real, (before, 0)), keys, None)
        if before or (window is not None and length > window):
            mask = torch.ones(length, before + length, dtype=torch.bool, device=self.device).tril(before)
            if window is not None:
                mask = mask.triu(before + 1 - window)
        return _Batch(places, real, keys, mask)

    def _made_runs(self, window: int | None) -> _Runs:
        segments = self._within(window)
        lengths = [_size(each.own) for each in segments]
        counts = [each.seen + length for each, length in zip(segments, lengths, strict=True)]
        starts, key_starts = (
            torch.tensor([0, *each], device=self.device).cumsum(0, dtype=torch.int32) for each in (lengths, counts)
        )
        keys = None
        if counts != lengths or self.keys is not None:
            keys = _places([run for each in segments for run in (*each.before, each.own)]).to(self.device)
        if keys is not None and self.keys is not None:
            keys = self.keys.order[keys]
        return _Runs(starts, max(lengths), key_starts, max(counts), keys)


def _last(runs: Sequence[Bounds], window: int | None) -> tuple[Bounds, ...]:
    """Return the end of `runs` that a token directly after them sees, if it sees `window` tokens, itself included."""
    reach, found = sys.maxsize if window is None else window - 1, []
    for start, stop in reversed(runs):
        if reach > 0:
            found.append((max(start, stop - reach), stop))
            reach -= stop - start
    return tuple(reversed(found))


def _places(runs: Sequence[Bounds]) -> torch.Tensor:
    return torch.cat([torch.arange(*run) for run in runs])


def _size(bounds: Bounds) -> int:
    return bounds[1] - bounds[0]


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend within each segment and its prefix.

    On a GPU in half precision, torch's variable-length kernel is used (from torch 2.11 on), unless a softcap, sinks, dropout or
    the head widths rule it out. Otherwise segments of about the same length form batches, padded to their longest segment.

    Args:
        query: [tokens, heads, width], all segments one after the other.
        key: [tokens, groups, width], where groups divides heads.
        value: [tokens, groups, value width].
        segments: What each token sees.
        scale: Factor of the scores; 1 / sqrt(width) by default.
        window: Number of tokens that each one sees, itself included; None for all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        sinks: [heads], one more score in each head's softmax, whose share of the attention is dropped.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        [tokens, heads, value width].
    """
    if segments.keys is not None:
        key, value = segments.keys.gathered(key, value)
    plain = softcap is None and sinks is None and not dropout
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % _WIDTH_STEP == 0 and width <= _WIDEST
    if plain and fits and query.is_cuda and query.dtype in _HALF and (kernel := varlen_kernel()) is not None:
        attend = partial(_by_kernel, *kernel, runs=segments.runs(window), scale=scale, window=window)
    elif plain:
        attend = partial(_in_batches, segments.batches(window), partial(_by_torch, scale=scale))
    else:
        written_out = partial(_written_out, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
        attend = partial(_in_batches, segments.batches(window), written_out)
    if torch.is_grad_enabled() and segments.copies > _MOST_COPIES * len(key):
        again: torch.Tensor = checkpoint(attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return again
    return attend(query, key, value)


def _in_batches(
    batches: tuple[list[_Batch], torch.Tensor],
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attend in each batch by `attend`, which takes query, key and value [segments, heads, length, width] and a mask."""
    parts = []
    for places, real, keys, mask in batches[0]:
        q, k, v = (
            tensor.index_select(0, chosen.flatten()).view(*chosen.shape, *tensor.shape[1:]).transpose(1, 2)
            for tensor, chosen in ((query, places), (key, keys), (value, keys))
        )
        parts.append(attend(q, k, v, mask).transpose(1, 2)[real])
    return torch.cat(parts).index_select(0, batches[1])


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    shared = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )


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


def _by_kernel(
    kernel: Callable[..., Any],
    shares_keys: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: _Runs,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend with torch's flash attention for sequences of different lengths.

    A segment's queries are the last of its keys: the kernel aligns both at their ends.
    """
    if runs.keys is not None:
        key, value = (each.index_select(0, runs.keys) for each in (key, value))
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
        runs.starts,
        runs.key_starts,
        runs.longest,
        runs.longest_keys,
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
    *,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention step by step, for the options that torch's own function lacks.

    Query, key and value are [segments, heads, length, width].
    """
    repeats, length, seen = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        beside = sinks.view(1, -1, 1, 1).expand(len(scores), -1, length, 1).to(scores.dtype)
        scores = torch.cat([scores, beside], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :seen]
    return functional.dropout(weights, dropout) @ value
