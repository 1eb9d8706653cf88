"""Checksums of every layer's output, which show whether a model computes from its parameters and from nothing else.

Equal parameters do not prove equal compute: a layer may have a second copy of a weight in a kernel's own format. Outputs for the
same few tokens are therefore compared between two models with equal parameters and different histories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlane.sync.version.tensor_spec import raw_bytes

from ..rank_model import RankModel

INPUT = "input of "
_TOKENS = 4
"""Tokens of the forward pass: few, since every weight of a dense layer takes part for each."""
_PATTERN = 13
"""Elements after which the fill pattern repeats: a prime, so that rows differ."""
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


def output_checksums(rank: RankModel, left_out: Collection[str] = (), *, inputs: bool = False) -> dict[str, str]:
    """Checksums of the outputs of each layer, and of the model, in order of computation. All ranks call this together.

    Layers in `left_out` have none. Later layers compute with a fixed pattern in the place of their outputs. With `inputs`, there
    are also checksums of each layer's inputs, as ``input of <layer>``, which can be left out, too: that layer then computes with
    the pattern.

    One forward pass runs without attention over earlier tokens, as in vLLM's memory profiling. Attention and state-space kernels
    leave their outputs unfilled in it. A fixed pattern fills these, so that later layers still compute from different values.

    Raises:
        Exception: The error of the forward pass.
    """
    from ...vllm_surface import set_forward_context  # noqa: PLC0415 - only in a vLLM worker

    checksums: dict[str, str] = {}
    hooks = []
    model: Any = rank.model
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            hook = _pattern_instead if name in left_out else _recorder(checksums, name)
            hooks.append(module.register_forward_hook(hook))
            before = f"{INPUT}{name}"
            if inputs or before in left_out:
                hooks.append(module.register_forward_pre_hook(_before(checksums, before, left_out), with_kwargs=True))
    count = _token_count(rank.config)
    tokens = torch.arange(count, device=rank.device)
    try:
        with (
            torch.no_grad(),
            PatternedMemory(),  # type: ignore[no-untyped-call]
            set_forward_context(None, rank.config, num_tokens=count, skip_compiled=True),
        ):
            hidden = model(input_ids=tokens, positions=tokens, intermediate_tensors=None, inputs_embeds=None)
            checksums["hidden states"] = _checksum(hidden)
            if getattr(model, "is_pooling_model", False):
                checksums |= {task: _checksum(pooled) for task, pooled in _pooled(rank, hidden)}
            elif (logits := model.compute_logits(hidden)) is not None:
                checksums["logits"] = _checksum(logits)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: checksum for name, checksum in checksums.items() if name not in left_out}


def _pooled(rank: RankModel, hidden: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Results of a pooling model for the hidden states of one sequence, by task."""
    from ...vllm_surface import PoolingMetadata, PoolingParams, PoolingStates  # noqa: PLC0415 - as above

    pooler: Any = rank.model.pooler
    lengths, tokens = torch.tensor([len(hidden)]), torch.arange(len(hidden), device=rank.device)[None]
    for task in sorted(pooler.get_supported_tasks()):
        params = PoolingParams(task=task)
        params.verify(rank.config.model_config)
        pooler.get_pooling_updates(task).apply(params)
        metadata = PoolingMetadata(
            prompt_lens=lengths,
            prompt_token_ids=tokens,
            prompt_token_ids_cpu=tokens.cpu(),
            pooling_params=[params],
            pooling_states=[PoolingStates()],
        )
        metadata.build_pooling_cursor(lengths.numpy(), seq_lens_cpu=lengths, device=hidden.device)
        yield task, pooler(hidden_states=hidden, pooling_metadata=metadata)


def _token_count(vllm_config: Any) -> int:
    """A few tokens; with experts one for each of them if possible, since every token meets only some experts."""
    model = vllm_config.model_config
    most = min(vllm_config.scheduler_config.max_num_batched_tokens, model.max_model_len, model.get_vocab_size())
    return max(_TOKENS, min(int(model.get_num_experts()), int(most)))


class PatternedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new uninitialised memory with a pattern, so that results are the same in every run."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and not result.is_meta:
            _fill(result)
        return result


def _fill(memory: torch.Tensor) -> None:
    """Fill `memory` with the pattern, or with zeros where it has none."""
    if memory.is_floating_point() and memory.is_contiguous():
        pattern = (torch.arange(_PATTERN, device=memory.device) * 0.125 - 0.75).to(memory.dtype)
        flat = memory.view(-1)
        repeated = flat.numel() // _PATTERN * _PATTERN
        flat[:repeated].view(-1, _PATTERN).copy_(pattern)
        flat[repeated:].copy_(pattern[: flat.numel() - repeated])
    else:
        memory.zero_()


def _before(checksums: dict[str, str], name: str, left_out: Collection[str]) -> Any:
    def look(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if name in left_out:
            _pattern_instead(module, args, given)
        else:
            checksums[name] = _checksum(given)

    return look


def _pattern_instead(module: torch.nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
    for item in _tensors(output):
        _fill(item)


def _recorder(checksums: dict[str, str], name: str) -> Any:
    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        checksums[name] = _checksum(output)

    return record


def _checksum(value: Any) -> str:
    checksum = hashlib.sha256()
    for item in _tensors(value):
        checksum.update(raw_bytes(item.detach().to("cpu").contiguous()).numpy().tobytes())
    return checksum.hexdigest()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
