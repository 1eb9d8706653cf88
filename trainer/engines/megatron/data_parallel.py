"""Sums of gradients over the data parallel ranks, and gathers of parameters from them, while the model computes.

megatron-core cuts parameters into buckets. With ``overlap_grad_reduce`` it sums a bucket's gradients when backward has the last
of them, which it can do once per step. A mini-batch of several calls has its gradients summed in each of them: see
`keep_sums_once`. Sums start in one order on all ranks, whichever gradients a rank's loss has: see `_start_ready`. Without
overlap, gradients are summed by `finalize_model_grads` in a step, and the functions here do nothing, or only clear the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ...config import TrainerConfig
from .layers import replay_routing
from .model import build_chunks, keep_expert_bias
from .model_facts import ModelFacts


def data_parallel_chunks(
    settings: TrainerConfig, config: TransformerConfig, facts: ModelFacts, device: torch.device
) -> list[Any]:
    """Build this rank's part of the model on `device`, wrapped for its dtype and for data parallelism."""
    layout, trained = settings.megatron, settings.trains_weights
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=trained and layout.overlap_grad_reduce,
        overlap_param_gather=trained and layout.overlap_param_gather,
        bucket_size=layout.bucket_parameters,
    )
    chunks = []
    for chunk in build_chunks(config, facts):
        if settings.router_replay:
            replay_routing(chunk)
        placed = chunk.to(device)
        wrapped = Float16Module(config, placed) if config.bf16 else placed
        keep_expert_bias(wrapped)
        wrapped.requires_grad_(trained)
        chunks.append(DistributedDataParallel(config, buffers, wrapped))
        chunks[-1].overlapped = _in_order_of_backward(chunks[-1]) if buffers.overlap_grad_reduce else []
    if buffers.overlap_grad_reduce:  # megatron-core's schedules call it around all micro-batches but the last
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    groups = [group for group, _ in _overlapped(chunks)]
    for group in groups:
        group.has_gradients = False
        group.start_grad_sync = partial(_start_ready, groups, group)
    return chunks


def gradient_buffers(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """List the buffers in which gradients are accumulated."""
    return [each.grad_data for chunk in chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def complete_sums(chunks: Sequence[Any]) -> None:
    """Start the sums that backward has not started, as a bucket may have no gradient, and wait for all. Collective."""
    groups = [group for group, _ in _overlapped(chunks)]
    for group in groups:
        if group.grad_reduce_handle is None:
            group.start_grad_sync()
    for group in groups:
        group.grad_reduce_handle.wait()


def keep_sums_once(chunks: Sequence[Any]) -> None:
    """Prepare sums for further gradients: keep each element on one of the ranks that have its sum, and set it to 0 on the others.

    The sum of these buffers and of further gradients is then the sum of all gradients. With the distributed optimizer, a rank has
    sums of its own part of a bucket only, and its own gradients elsewhere, which are in those sums.
    """
    for group, ranks in _overlapped(chunks):
        if group.grad_reduce_handle is None:
            continue
        for bucket in group.buckets:
            sums, rank = bucket.grad_data, ranks.rank()
            if group.ddp_config.use_distributed_optimizer:
                part = sums.numel() // ranks.size()
                sums[: part * rank].zero_()
                sums[part * (rank + 1) :].zero_()
            elif rank > 0:
                sums.zero_()
        _forget_sums(group)


def clear_gradients(chunks: Sequence[Any]) -> None:
    """Set all gradients to 0, and forget sums that have been started: waits for them first, which may fail."""
    groups = [group for group, _ in _overlapped(chunks)]
    handles = [group.grad_reduce_handle for group in groups if group.grad_reduce_handle is not None]
    for group in groups:
        _forget_sums(group)
    try:
        for handle in handles:
            handle.wait()
    finally:
        for chunk in chunks:
            chunk.zero_grad_buffer()


@contextmanager
def not_summed(chunks: Sequence[Any]) -> Iterator[None]:
    """Accumulate gradients inside the block without summing them; `complete_sums` must follow before a step."""
    keep_sums_once(chunks)
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        yield


def gather_parameters(chunks: Sequence[Any]) -> None:
    """Gather the parameters that no forward pass has gathered since the last step, or whose gather has not ended. Collective.

    It precedes passes in which the weights have no gradient, on some ranks or on all: megatron-core's hooks, which gather the
    parameters of a module when it is called, would refuse them. It also precedes changes of the weights: a forward pass that
    failed may have left a gather behind, for which megatron-core would wait instead of gathering again.
    """
    for group, _ in reversed(_overlapped(chunks)):
        waits = not group.param_gather_dispatched or group.param_gather_handle is not None
        if group.ddp_config.overlap_param_gather and waits:
            group.start_param_sync(force_sync=True)


@contextmanager
def frozen(chunks: Sequence[Any]) -> Iterator[None]:
    """Compute no gradients of the model's own weights inside the block. Collective."""
    gather_parameters(chunks)
    hooked = [chunk for chunk in chunks if chunk.use_forward_hook]
    parameters = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def _overlapped(chunks: Sequence[Any]) -> list[tuple[Any, Any]]:
    """List the groups of buckets whose gradients are summed in backward, each with its ranks; none without overlap.

    They are in the order of backward, which is that of their sums.
    """
    return [each for chunk in reversed(chunks) for each in chunk.overlapped]


def _in_order_of_backward(chunk: Any) -> list[tuple[Any, Any]]:
    """List the groups of a chunk, dense and of experts; the first is the one whose first parameter comes last in the model."""
    places = {parameter: place for place, parameter in enumerate(chunk.parameters())}
    groups = [(group, chunk.intra_dp_cp_group) for group in chunk.bucket_groups]
    groups += [(group, chunk.intra_expt_dp_group) for group in chunk.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda each: -min(places[parameter] for parameter in each[0].params))


def _start_ready(groups: Sequence[Any], group: Any, force_all_reduce: bool = False) -> None:
    """Note that `group` has all its gradients, and start the sums of `groups` up to the first that has not.

    This replaces megatron-core's ``start_grad_sync`` of each group, which would start a sum as soon as it can: ranks whose losses
    reach other parameters, or have their first pass later, would sum different groups together.
    """
    start = type(group).start_grad_sync
    group.has_gradients = True
    if group.grad_reduce_handle is not None:
        start(group, force_all_reduce)  # refuses, unless it is a step's call, after which there is nothing to start
        return
    for each in takewhile(lambda each: each.has_gradients, groups):
        if each.grad_reduce_handle is None:
            start(each, force_all_reduce)


def _forget_sums(group: Any) -> None:
    group.grad_reduce_handle, group.has_gradients = None, False
    if group.is_first_batch and len(group.per_param_grad_ready_counts) < len(group.params):
        # In its first backward pass megatron-core notes how often each gradient is ready; this one hadn't all.
        group.per_param_grad_ready_counts = {}
    group.reset()
