"""Make transformers models attend to packed sequences, with an attention implementation registered with transformers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ..attention import Segments, packed_attention

IMPLEMENTATION = "weightlane_packed"
SEGMENTS = "weightlane_segments"
"""The argument of models and of their attention, `Segments`, that says what each packed token sees."""
_ATTENTIONS = {"full_attention", "sliding_attention"}
_HARMLESS = {"position_ids"}
"""Tensor arguments that attention may ignore: rotation by position is done before."""


def can_pack(skeleton: torch.nn.Module) -> bool:
    """Whether the architecture of `skeleton`, a model whose parameters are on the meta device, can take packed sequences.

    It cannot where layers other than attention carry a state from token to token, where attention is not transformers'
    exchangeable one or has a mask or a bias of its own, or where the model doesn't pass it the segments or the sliding window.
    """
    config: Any = skeleton.config.get_text_config()  # type: ignore[operator, union-attr]  # of transformers' PreTrainedModel
    kinds = list(getattr(config, "layer_types", None) or ())
    carries = any(isinstance(module, torch.nn.Conv1d | torch.nn.RNNBase) for module in skeleton.modules())
    if not getattr(skeleton, "_supports_attention_backend", False) or set(kinds) - _ATTENTIONS or carries:
        return False
    probe = copy.deepcopy(skeleton).to("meta")
    pack_attention(probe)
    window = getattr(config, "sliding_window", None) or 0
    if kinds and "sliding_attention" not in kinds:
        window = 0
    if kinds and window:
        _begin_with(probe, kinds.index("sliding_attention"))
    two = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        # With a mask, transformers doesn't read the values of positions, which the meta device does not have.
        probe(input_ids=two, attention_mask=two, weightlane_probe=window, use_cache=False)
    except _ProbedError:
        return True
    except Exception:  # noqa: BLE001 - however an architecture fails without data, padding works for it
        return False
    return False


def _begin_with(model: torch.nn.Module, first: int) -> None:
    """Move the layers before the layer `first` of a transformers model behind the others, with their kinds."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]  # of transformers' PreTrainedModel
    kinds = config.layer_types
    config.layer_types = [*kinds[first:], *kinds[:first]]
    for blocks in model.modules():
        if isinstance(blocks, torch.nn.ModuleList) and len(blocks) == len(kinds):
            for number, layer in enumerate([*blocks[first:], *blocks[:first]]):
                blocks[number] = layer


def pack_attention(model: torch.nn.Module) -> None:
    """Make `model` attend to packed sequences.

    Afterwards, ``model(input_ids, position_ids, weightlane_segments, ...)`` takes all sequences in one row, ``input_ids`` int64
    [1, N], see `SEGMENTS`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional, and slow to import

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]  # of transformers' PreTrainedModel


class _ProbedError(Exception):
    """Raised by the first attention layer of a probe that receives all the arguments it needs."""


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: the segments determine which tokens each token sees."""


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    weightlane_segments: Segments | None = None,
    weightlane_probe: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface: takes [1, heads, N, width] each, returns [1, N, heads, width].

    `weightlane_probe` is for `can_pack`: the sliding window that the layer's mask would have, 0 for none.
    """
    ignored = {"attention_mask": attention_mask, **others}
    odd = [name for name, value in ignored.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
    if weightlane_probe and not sliding_window:
        odd.append("a window in its mask alone")
    if odd:
        raise ConfigError(
            f"{type(module).__name__} attends by {', '.join(odd)}, too, which is not done for packed sequences.",
            part="fsdp2 engine",
            hint="Set trainer.fsdp2.packing to off.",
        )
    if weightlane_probe is not None:
        raise _ProbedError
    if weightlane_segments is None:
        raise ConfigError(
            f"{type(module).__name__} was not told where packed sequences begin, since its model hands nothing on.",
            part="fsdp2 engine",
            hint="Set trainer.fsdp2.packing to off.",
        )
    out = packed_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        weightlane_segments,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return out[None].contiguous(), None
