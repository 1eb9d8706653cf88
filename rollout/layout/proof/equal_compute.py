"""Does a model compute from the tensors that are copied into, and from nothing else?

Equal parameters are no proof of equal compute: a layer may hold a second copy of a weight in a kernel's own format. What each
layer gives for the same few tokens is therefore compared between two states that have equal parameters and different histories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlane.sync.version.tensor_spec import raw_bytes

_TOKENS = 4
_PATTERN = 13
_aten = torch.ops.aten
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)


def layer_digests(model: torch.nn.Module, vllm_config: Any, device: torch.device) -> dict[str, str]:
    """A digest of what each layer, and the whole model, gives for the first few token ids; more where there are experts to meet.

    One forward pass without attention over earlier tokens: what vLLM runs to measure memory. Attention and state-space kernels
    leave their outputs unfilled in it; a fixed pattern stands for these, so that the layers behind still tell something. All
    tensor-parallel ranks call this together.

    Raises:
        Exception: What the forward pass raised.
    """
    from ...vllm_internals.internals import set_forward_context  # noqa: PLC0415 - only in a vLLM worker

    digests: dict[str, str] = {}
    hooks = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            hooks.append(module.register_forward_hook(_recorder(digests, name)))
    count = _token_count(vllm_config)
    tokens = torch.arange(count, device=device)
    try:
        with (
            torch.no_grad(),
            Patterned(),  # type: ignore[no-untyped-call]
            set_forward_context(None, vllm_config, num_tokens=count, skip_compiled=True),
        ):
            hidden = model(input_ids=tokens, positions=tokens, intermediate_tensors=None, inputs_embeds=None)
            digests["hidden states"] = _digest(hidden)
            if (logits := model.compute_logits(hidden)) is not None:  # type: ignore[operator]
                digests["logits"] = _digest(logits)
    finally:
        for hook in hooks:
            hook.remove()
    return digests


def _token_count(vllm_config: Any) -> int:
    """A few; with experts one for each of them where that many can be computed, since every token meets some only."""
    model = vllm_config.model_config
    most = min(vllm_config.scheduler_config.max_num_batched_tokens, model.max_model_len, model.get_vocab_size())
    return max(_TOKENS, min(int(model.get_num_experts()), int(most)))


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first layer in order of computation that gave something else, or None."""
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), None)


class Patterned(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills memory that nobody has written with a pattern, so that results are the same in every run."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and not result.is_meta:
            if result.is_floating_point() and result.is_contiguous():
                pattern = (torch.arange(_PATTERN, device=result.device) * 0.125 - 0.75).to(result.dtype)
                flat = result.view(-1)
                whole = flat.numel() // _PATTERN * _PATTERN
                flat[:whole].view(-1, _PATTERN).copy_(pattern)
                flat[whole:].copy_(pattern[: flat.numel() - whole])
            else:
                result.zero_()
        return result


def _recorder(digests: dict[str, str], name: str) -> Any:
    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        digests[name] = _digest(output)

    return record


def _digest(value: Any) -> str:
    seen = hashlib.sha256()
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            seen.update(raw_bytes(item.detach().to("cpu").contiguous()).numpy().tobytes())
    return seen.hexdigest()
