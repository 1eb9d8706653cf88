"""Keeps the weights of mixture-of-experts layers alive on vLLM's CPU platform.

After loading, vLLM on CPU permutes the experts' weights in place for its kernel, and pads them; its reload of a whole model does
not do that again, so that weights which were replaced have the right shapes and generate garbage. Its kernel does not know
either which experts a rank holds where they are divided between ranks. With the functions below in place experts are
computed from their parameters as they were loaded, as on a GPU, one matrix product for each expert that has a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .cpu_linear import uses_weightlane

_PATCHED = "_weightlane_original"
_LIVE = "_weightlane_live"
_GPT_OSS_LIMIT = 7.0
_GPT_OSS_ALPHA = 1.702


def keep_expert_parameters_live() -> None:
    """Replace how vLLM prepares and computes unquantised experts on CPU; calling it again does nothing.

    The replacement asks the current vLLM config on each call and does as before for an engine that does not use weightlane.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415 - only in processes that run vLLM

    experts = cpu_moe.CPUUnquantizedExperts
    if hasattr(experts.apply, _PATCHED):
        return
    prepare, compute = experts.process_weights_after_loading, experts.apply

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        # zentorch's kernel takes the weights as they were loaded, and is kept.
        if not uses_weightlane() or cpu_moe.is_zentorch_moe_supported(layer):
            prepare(self, layer)
            return
        setattr(self, _LIVE, True)

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if not getattr(self, _LIVE, False):
            compute(
                self,
                output,
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                a1q_scale,
                a2_scale,
                workspace13,
                workspace2,
                expert_tokens_meta,
                apply_router_weight_on_input,
            )
            return
        biases = self.w1_bias, self.w2_bias
        weights = None if apply_router_weight_on_input else topk_weights
        _experts(output, hidden_states, w1, w2, *biases, weights, topk_ids, expert_map, activation.value)

    setattr(apply, _PATCHED, compute)
    experts.process_weights_after_loading = process_weights_after_loading
    experts.apply = apply


def computes_from_parameters(layer: torch.nn.Module) -> bool:
    """Whether a mixture-of-experts layer on CPU computes from the parameters that loading fills."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return bool(getattr(experts, _LIVE, False) or getattr(experts, "_use_zentorch", False))


@torch.library.custom_op("weightlane::cpu_experts", mutates_args=("output",))
def _experts(
    output: torch.Tensor,
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    chosen: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
) -> None:
    """Compute a mixture of experts. An operator of its own, because which experts have tokens is known to no compiler.

    A token's result does not depend on the order of other tokens: its experts are summed in the order in which they were chosen.

    Args:
        output: What is written, of shape ``[tokens, hidden]``.
        hidden: ``[tokens, hidden]``.
        w1: Gate and up projections, ``[local experts, 2 * intermediate, hidden]``.
        w2: Down projections, ``[local experts, hidden, intermediate]``.
        w1_bias: ``[local experts, 2 * intermediate]``.
        w2_bias: ``[local experts, hidden]``.
        weights: Of each choice, ``[tokens, choices]``; None where `hidden` was multiplied by them.
        chosen: Numbers of experts, ``[tokens, choices]``; those below 0 count for nothing.
        expert_map: The local number of each expert, -1 for those of other ranks; None where all are here.
        activation: vLLM's name of the activation.
    """
    choices = chosen.shape[1]
    local = chosen.flatten().long()
    if expert_map is not None:
        local = torch.where(local < 0, local, expert_map[local.clamp(min=0)].long())
    order = local.argsort(stable=True)
    counts = torch.bincount(local[local >= 0], minlength=w1.shape[0]).tolist()
    results = torch.zeros(len(order), hidden.shape[1], dtype=torch.float32)
    start = len(order) - sum(counts)
    for expert, count in enumerate(counts):
        if not count:
            continue
        places = order[start : start + count]
        start += count
        inner = functional.linear(
            hidden[places // choices], w1[expert], None if w1_bias is None else w1_bias[expert].to(hidden.dtype)
        )
        made = functional.linear(
            _activated(inner, activation), w2[expert], None if w2_bias is None else w2_bias[expert].to(hidden.dtype)
        ).float()
        results[places] = made if weights is None else made * weights.flatten()[places].unsqueeze(-1)
    output.copy_(results.view(-1, choices, hidden.shape[1]).sum(1))


def _activated(inner: torch.Tensor, activation: str) -> torch.Tensor:
    """The gated activations that vLLM has on CPU, of ``[tokens, 2 * intermediate]``."""
    if activation == "swigluoai":  # gpt-oss: gate and up alternate; transformers' GptOssExperts has the formula
        gate, up = inner[..., ::2], inner[..., 1::2]
        gate = gate.clamp(max=_GPT_OSS_LIMIT)
        return (up.clamp(-_GPT_OSS_LIMIT, _GPT_OSS_LIMIT) + 1) * gate * torch.sigmoid(gate * _GPT_OSS_ALPHA)
    gate, up = inner.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
