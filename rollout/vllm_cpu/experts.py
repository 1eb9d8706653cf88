"""Lets mixture-of-experts layers on vLLM's CPU platform compute from their parameters, as on a GPU.

After loading, vLLM on CPU permutes and pads the experts' weights in place for its kernel. Its reload of a whole model does not
repeat that, so that replaced weights have the right shapes and generate garbage. Its kernel also ignores which experts a rank
holds if experts are divided between ranks. The functions below compute experts from their parameters as they were loaded, with
one matrix product per expert that has a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from .layers import built_for_weightlane

_LIVE = "_weightlane_live"
_ROUTING = ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function")
"""Settings that experts of vLLM 0.28 and 0.29, which choose the experts of each token themselves, take from their layer."""
_GPT_OSS_LIMIT = 7.0
_GPT_OSS_ALPHA = 1.702
"""Constants of gpt-oss's activation, from transformers' ``GptOssExperts``."""


def keep_expert_parameters_live() -> None:
    """Replace how vLLM prepares and computes unquantised experts on CPU.

    The replacement checks the current vLLM config on each call, and does as before for an engine that does not use weightlane.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415 - only in processes that run vLLM

    experts = cpu_moe.CPUUnquantizedExperts
    prepare, compute = experts.process_weights_after_loading, experts.apply

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        # zentorch's kernel computes from the weights as they were loaded.
        if not built_for_weightlane() or cpu_moe.is_zentorch_moe_supported(layer):
            prepare(self, layer)
            return
        for name in _ROUTING if "router_logits" in signature.parameters else ():
            setattr(self, name, getattr(layer, name))
        setattr(self, _LIVE, True)

    signature = inspect.signature(compute)

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, _LIVE, False):
            return compute(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        if "router_logits" in call:
            call |= _choose(self, call)
        _experts(
            call["output"],
            call["hidden_states"],
            call["w1"],
            call["w2"],
            self.w1_bias,
            self.w2_bias,
            None if call["apply_router_weight_on_input"] else call["topk_weights"],
            call["topk_ids"],
            call["expert_map"],
            call["activation"].value,
        )
        return call["output"] if "router_logits" in call else None

    experts.process_weights_after_loading = process_weights_after_loading
    experts.apply = apply


def _choose(experts: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that vLLM 0.30 and newer make of those of 0.28 and 0.29: the chosen experts, and a tensor for the output."""
    hidden = call["hidden_states"]
    named = ("router_logits", "num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor")
    weights, chosen = experts._select_experts(hidden, *(call[name] for name in named))
    if call["apply_router_weight_on_input"]:
        hidden = hidden * weights.to(hidden.dtype)
    return {
        "output": torch.empty_like(hidden),
        "hidden_states": hidden,
        "topk_weights": weights,
        "topk_ids": chosen,
    }


def computes_from_parameters(layer: torch.nn.Module) -> bool:
    """Whether `layer`, a mixture of experts on CPU, computes from the parameters that loading fills."""
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
    """Compute a mixture of experts. It is a custom operator because a compiler cannot know which experts have tokens.

    A token's result does not depend on other tokens: its experts are summed in the order in which they were chosen.

    Args:
        output: The result, which is written, of shape ``[tokens, hidden]``.
        hidden: ``[tokens, hidden]``.
        w1: Gate and up projections, ``[local experts, 2 * intermediate, hidden]``.
        w2: Down projections, ``[local experts, hidden, intermediate]``.
        w1_bias: ``[local experts, 2 * intermediate]``.
        w2_bias: ``[local experts, hidden]``.
        weights: Router weights, ``[tokens, choices]``; None if `hidden` was multiplied by them.
        chosen: Expert numbers, ``[tokens, choices]``; those below 0 are ignored.
        expert_map: The local number of each expert, -1 for those of other ranks; None if this rank has all.
        activation: vLLM's name for the activation.
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
        tokens = order[start : start + count]
        start += count
        inner = functional.linear(
            hidden[tokens // choices], w1[expert], None if w1_bias is None else w1_bias[expert].to(hidden.dtype)
        )
        made = functional.linear(
            _activated(inner, activation), w2[expert], None if w2_bias is None else w2_bias[expert].to(hidden.dtype)
        ).float()
        results[tokens] = made if weights is None else made * weights.flatten()[tokens].unsqueeze(-1)
    output.copy_(results.view(-1, choices, hidden.shape[1]).sum(1))


def _activated(inner: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of vLLM's gated activations on CPU to ``[tokens, 2 * intermediate]``."""
    if activation == "swigluoai":  # gpt-oss: gate and up alternate.
        gate, up = inner[..., ::2], inner[..., 1::2]
        gate = gate.clamp(max=_GPT_OSS_LIMIT)
        return (up.clamp(-_GPT_OSS_LIMIT, _GPT_OSS_LIMIT) + 1) * gate * torch.sigmoid(gate * _GPT_OSS_ALPHA)
    gate, up = inner.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
