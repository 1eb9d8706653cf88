"""From a Hugging Face configuration to the chunks of megatron-core's ``GPTModel`` that a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from .config import TrainerConfig
from .megatron_layers import decoder_spec
from .megatron_layout import ModelFacts


def transformer_config(
    config: TrainerConfig, facts: ModelFacts, *, on_cpu: bool, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's description of the model and of how it is split."""
    shape, layout = facts.shape, config.megatron
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_intermediate,
            "moe_router_topk": facts.experts_per_token,
            # Softmax over the chosen experts only is softmax over all, renormalised.
            "moe_router_pre_softmax": not facts.renormalize,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
        }
    recompute: dict[str, Any] = {}
    if config.activation_checkpointing:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate or shape.expert_intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=facts.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_parallel,
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
        # With two stages, both neighbours are one rank, and only separate messages cannot be taken for each other.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        # The engine divides by the tokens of the whole batch itself, and sums over the data parallel ranks.
        calculate_per_token_loss=True,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,  # every weight comes from the checkpoint
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **experts,
    )


def build_chunks(config: TransformerConfig, facts: ModelFacts) -> list[torch.nn.Module]:
    """This rank's part of the model, all zeros: one ``GPTModel``, or one per virtual pipeline stage."""
    virtual = config.virtual_pipeline_model_parallel_size
    shape, tensor = facts.shape, config.tensor_model_parallel_size
    padded = -(-shape.vocab // tensor) * tensor
    chunks: list[torch.nn.Module] = []
    for index in range(virtual or 1):
        stage = index if virtual else None
        chunks.append(
            GPTModel(
                config,
                decoder_spec(config, qk_norm=shape.qk_norm, chunk=stage),
                vocab_size=padded,
                max_sequence_length=facts.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
                rotary_base=facts.rope_theta,
                rope_scaling=facts.rope_factor is not None,
                rope_scaling_factor=facts.rope_factor or 1.0,
                vp_stage=stage,
            )
        )
        _mark_parameters(chunks[-1])
    return chunks


def _mark_parameters(chunk: torch.nn.Module) -> None:
    """Do what megatron-core's initialisation, which is left out, does beside drawing numbers.

    Its gradient norm counts what is not marked as cut on tensor parallel rank 0 only. Zeros matter for the padding of the
    vocabulary, which no checkpoint fills.
    """
    cut = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if type(module) in cut and weight is not None:
            set_tensor_model_parallel_attributes(weight, True, cut[type(module)], 1)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()
