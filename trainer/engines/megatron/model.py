"""Build a rank's chunks of megatron-core's ``GPTModel`` from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig
from .head import prepared_head
from .layers import AlternatingLinear, GroupedLinear, decoder_spec
from .model_facts import ModelFacts


def transformer_config(
    config: TrainerConfig, facts: ModelFacts, *, device: torch.device, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron-core's configuration of the model and of its parallel layout, for a model on `device`.

    Raises `ConfigError` for settings that `device` or the libraries here do not have.
    """
    shape, layout = facts.shape, config.megatron
    for setting, holds, problem in (
        ("transformer_engine", device.type != "cpu", "there is no CUDA device for it"),
        (
            "transformer_engine",
            device.type != "cuda" or find_spec("transformer_engine") is not None,
            "TransformerEngine is not installed on this rank's machine (pip install 'transformer-engine[pytorch]')",
        ),
        (
            "grouped_gemm",
            device.type != "cuda" or dtype == torch.bfloat16,
            "torch's grouped matrix products are for bfloat16 on CUDA devices",
        ),
    ):
        if getattr(layout, setting) and not holds:
            raise ConfigError(
                f"trainer.megatron.{setting} is true, but {problem}.",
                part="megatron engine",
                hint=f"Set trainer.megatron.{setting} to false.",
            )
    windows = [window for window in facts.windows if window is not None]
    recompute: dict[str, Any] = {}
    if config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    made = (MLATransformerConfig if shape.latent else TransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate or shape.expert_intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=facts.norm_eps,
        qk_layernorm=shape.qk_norm,
        layernorm_zero_centered_gamma=bool(shape.delta),
        attention_output_gate=bool(shape.delta),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu if facts.activation_limit is None else quick_gelu,
        activation_func_clamp_value=facts.activation_limit,
        glu_linear_offset=0.0 if facts.activation_limit is None else 1.0,
        rotary_interleaved=facts.rotary_interleaved,
        window_size=(windows[0] - 1, 0) if windows else None,
        window_attn_skip_freq=[int(window is not None) for window in facts.windows] or None,
        softmax_type="learnable" if shape.gpt_oss else "vanilla",
        add_bias_linear=shape.gpt_oss,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_parallel,
        context_parallel_size=layout.context_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.sequence_parallel,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password, but the only one for micro batches of different lengths
        variable_seq_lengths=layout.pipeline_parallel > 1,
        # With two stages, both neighbours are the same rank, and batched messages could be mistaken for each other.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # The engine itself divides by the tokens of the full batch, and sums over the data parallel ranks.
        calculate_per_token_loss=True,
        # A model without data has the same parameters either way.
        transformer_impl="transformer_engine" if layout.transformer_engine and device.type == "cuda" else "local",
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every weight comes from the checkpoint
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **_experts(facts, grouped=layout.grouped_gemm),
        **_latent(facts),
    )
    if not shape.latent:
        for key, value in facts.yarn.items():  # megatron-core reads these, and declares them for latent attention only
            setattr(made, f"yarn_{key}", value)
    return made


def _experts(facts: ModelFacts, *, grouped: bool) -> dict[str, Any]:
    """Return megatron-core's settings for experts; empty for a model without any."""
    shape, routing = facts.shape, facts.routing
    if routing is None:
        return {}
    limited = {"moe_router_num_groups": routing.groups, "moe_router_group_topk": routing.chosen_groups}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_intermediate,
        "moe_layer_freq": [int(shape.has_experts(layer)) for layer in range(shape.layers)],
        "moe_shared_expert_intermediate_size": shape.shared_intermediate or None,
        "moe_shared_expert_gate": bool(shape.delta),
        "moe_router_topk": routing.experts_per_token,
        "moe_router_score_function": routing.scores,
        # Softmax over the chosen experts only is softmax over all, renormalised.
        "moe_router_pre_softmax": routing.scores == "sigmoid" or not routing.renormalize,
        "moe_router_topk_scaling_factor": routing.scale if routing.scale != 1 else None,
        "moe_router_enable_expert_bias": shape.expert_bias,
        "moe_router_bias_update_rate": 0.0,  # it stays as loaded, as in transformers
        # As transformers computes DeepSeek's and GLM's.
        "moe_router_dtype": "fp32" if shape.latent or shape.expert_bias else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        **(limited if routing.groups > 1 else {}),
    }


def _latent(facts: ModelFacts) -> dict[str, Any]:
    """Return megatron-core's settings for multi-latent attention; empty for a model without it."""
    latent = facts.shape.latent
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": facts.rope_theta,
        "rope_type": "yarn" if facts.yarn else "rope",
        "rotary_scaling_factor": 1.0,
        **facts.yarn,
    }


def build_chunks(config: TransformerConfig, facts: ModelFacts) -> list[torch.nn.Module]:
    """Build this rank's part of the model, all zeros: one ``GPTModel``, or one per virtual pipeline stage."""
    virtual = config.virtual_pipeline_model_parallel_size
    shape, tensor = facts.shape, config.tensor_model_parallel_size
    padded = -(-shape.vocab // tensor) * tensor
    chunks: list[torch.nn.Module] = []
    for index in range(virtual or 1):
        stage = index if virtual else None
        chunks.append(
            GPTModel(
                config,
                decoder_spec(config, shape, chunk=stage),
                vocab_size=padded,
                max_sequence_length=facts.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="yarn" if facts.yarn and not shape.latent else "rope",
                rotary_base=facts.rope_theta,
                rotary_percent=facts.rotary_share,
                rope_scaling=facts.rope_factor is not None,
                rope_scaling_factor=facts.rope_factor or 1.0,
                vp_stage=stage,
            )
        )
        _mark_parameters(chunks[-1])
        _rotate_by_positions(chunks[-1])
        if chunks[-1].post_process:
            chunks[-1].output_layer = prepared_head(chunks[-1].output_layer, valued=shape.valued)
    return chunks


def keep_expert_bias(chunk: torch.nn.Module) -> None:
    """Make routers' biases float32 now. Routers would do so in their first forward pass, after views of them were taken."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()


def _mark_parameters(chunk: torch.nn.Module) -> None:
    """Do the part of megatron-core's initialisation, which is skipped, other than drawing random weights.

    megatron-core's gradient norm counts parameters that are not marked as split only on tensor parallel rank 0. Zeros matter for
    the padding of the vocabulary, which no checkpoint fills.
    """
    cut = {
        VocabParallelEmbedding: 0,
        ColumnParallelLinear: 0,
        AlternatingLinear: 0,
        GroupedLinear: 0,
        RowParallelLinear: 1,
    }
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if type(module) in cut and weight is not None:
            set_tensor_model_parallel_attributes(weight, True, cut[type(module)], 1)
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            # It is no copy of another rank's bias, as that of other layers is.
            set_tensor_model_parallel_attributes(module.bias, True, 0, 1)
            module.bias.sequence_parallel = False
            # A sum over this one rank would be a view, to which megatron-core could not add the bias in place.
            module.explicit_expert_comm = True
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()


def _rotate_by_positions(chunk: torch.nn.Module) -> None:
    """Rotate the tokens of a row with `PackedRow.positions` by these.

    megatron-core makes rotary embeddings of the positions from 0 on, and a hook picks one of them for each token. Since they are
    then as many as the row has tokens, megatron-core applies them one to one.
    """

    def follow(owner: torch.nn.Module, embedding: torch.nn.Module) -> None:
        positions: torch.Tensor | None = None

        def before(_module: torch.nn.Module, _arguments: Any, options: dict[str, Any]) -> None:
            nonlocal positions
            positions = options["packed_seq_params"].positions

        def after(_module: torch.nn.Module, _arguments: Any, found: Any) -> Any:
            if positions is None:
                return None
            return (found[0][positions], *found[1:]) if isinstance(found, tuple) else found[positions]

        owner.register_forward_pre_hook(before, with_kwargs=True)
        embedding.register_forward_hook(after)

    for module in chunk.modules():
        if isinstance(embedding := getattr(module, "rotary_pos_emb", None), torch.nn.Module):
            follow(module, embedding)


def forget_caches(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop what megatron-core keeps of past passes, so that the model and its process groups end with the engine.

    Its caches of rotary tables hold up to 32 embeddings, with their process groups. Layers of experts keep tensors of their last
    pass, whose autograd graph leads to the weights, and hooks of these to the model: a cycle that Python's collector cannot see.
    """
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    for module in (module for chunk in chunks for module in chunk.modules()):
        for keeper in (module, getattr(module, "token_dispatcher", None)):
            for name, value in list(getattr(keeper, "__dict__", {}).items()):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    setattr(keeper, name, None)
