"""The layers that megatron-core's ``GPTModel`` is built from here: its parallel layers, with a norm and an attention of our own.

Without TransformerEngine, megatron-core has neither for training with sequence parallelism or long sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention

from ...attention import packed_attention
from ..model_facts import CheckpointShape
from ..rows import PackedRow
from .gated_delta_net import GatedDeltaNet
from .grouped_experts import GroupedExperts

if not hasattr(moe_utils, "te_general_gemm"):
    # megatron-core 0.16.1 compares it to None, but defines it only if TransformerEngine is installed.
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):
    # Without TransformerEngine, TELinear is a placeholder, which megatron-core 0.16.1 mistakes for the class.
    multi_latent_attention.HAVE_TE = False


class RmsNorm(torch.nn.Module):
    """Root mean square normalization in float32 (Zhang and Sennrich, arXiv 1910.07467), as Hugging Face models compute it.

    Its weight has the attribute that makes megatron-core sum its gradient over the ranks of sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self._eps, self._offset = eps, float(config.layernorm_zero_centered_gamma)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise [..., hidden_size] of any floating dtype; the result has the same shape."""
        normal = torch.nn.functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self._eps)
        if self._offset:
            return (normal * (self._offset + self.weight.float())).to(hidden.dtype)
        return self.weight * normal.to(hidden.dtype)


class CausalAttention(torch.nn.Module):
    """Causal attention over packed sequences; memory grows with the longest sequence, not with its square."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        del attn_mask_type, attention_type
        self._scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedRow,
        **__: Any,
    ) -> torch.Tensor:
        """Attend within each sequence: see `packed_attention` for the shapes."""
        options: dict[str, Any] = {"scale": self._scale, "window": self._window, "sinks": self.softmax_offset}
        return packed_attention(query, key, value, packed_seq_params.segments, **options).contiguous()


class AlternatingLinear(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core is untyped to us
    """The first layer of an expert whose rows are those of gate and up in turns, as in GPT-OSS's checkpoints."""

    def forward(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and bias as megatron-core expects them: those of the gate, then those of up."""
        output, bias = (
            torch.cat([each[..., ::2], each[..., 1::2]], -1) for each in super().forward(*arguments, **options)
        )
        return output, bias


class NormedAdd(torch.nn.Module):
    """Adds the norm of a layer's output to its input."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *_: Any) -> Callable[[Any, torch.Tensor, float], torch.Tensor]:
        """Return a function of the output, which is a tensor and a bias or None; of the input; and of the dropout, which is 0."""

        def add(given: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, _: float) -> torch.Tensor:
            output, bias = given
            normal: torch.Tensor = self.norm(output if bias is None else output + bias)
            return residual + normal

        return add


_LATENT_EPS = 1e-6
"""Epsilon of latent vectors' norms in transformers, whatever the configuration says; megatron-core has one for all norms."""


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron-core is untyped to us
    """megatron-core's multi-latent attention, with the projections to latent vectors replicated on every rank.

    megatron-core 0.16.1 splits them by rows and gathers their outputs. Each rank then has only its own heads' part of the
    gradient of the rotary keys, which all heads share, and nothing sums these parts. With sequence parallelism, which experts
    need, replicated projections are correct: every rank projects its own positions.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_kv_down_proj = _WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = RmsNorm(config, config.kv_lora_rank, eps=_LATENT_EPS)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _WholeLinear(config, config.q_lora_rank)
            self.q_layernorm = RmsNorm(config, config.q_lora_rank, eps=_LATENT_EPS)


class _WholeLinear(torch.nn.Module):
    """A linear layer from the hidden size to `features`, replicated on tensor parallel ranks, each with its own positions."""

    def __init__(self, config: TransformerConfig, features: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(features, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [..., hidden_size] to [..., features]; returns that, and None for the bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


@dataclass(frozen=True, slots=True)
class _Modules:
    """The classes that layers are made of. Their parameters have the same names and shapes, whichever these are."""

    column: Any
    row: Any
    norm: Any
    attention: Any


def _modules(config: TransformerConfig) -> _Modules:
    """Choose TransformerEngine's, or megatron-core's and ours. Norms are never fused with linear layers."""
    if config.transformer_impl == "local":
        return _Modules(ColumnParallelLinear, RowParallelLinear, RmsNorm, CausalAttention)
    from megatron.core.extensions import transformer_engine as te  # noqa: PLC0415 - a package that few have

    return _Modules(te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm, te.TEDotProductAttention)


def decoder_spec(config: TransformerConfig, model: CheckpointShape, *, chunk: int | None) -> TransformerBlockSubmodules:
    """Describe the decoder layers of this pipeline stage, or of its virtual stage `chunk`."""
    use = _modules(config)
    linears = MLPSubmodules(linear_fc1=use.column, linear_fc2=use.row)
    first_linear = AlternatingLinear if model.gpt_oss else ColumnParallelLinear
    of_expert = MLPSubmodules(linear_fc1=first_linear, linear_fc2=RowParallelLinear)
    sequential = ModuleSpec(module=SequentialMLP, submodules=of_expert)
    dense = ModuleSpec(module=MLP, submodules=linears)
    experts = ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=GroupedExperts) if config.moe_grouped_gemm else sequential,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )
    attention = _latent_attention(use) if config.multi_latent_attention else _attention(use, model.qk_norm)
    linear = ModuleSpec(module=GatedDeltaNet, params={"delta": model.delta})
    add = ModuleSpec(module=NormedAdd, params={"config": config}) if model.output_norms else get_bias_dropout_add

    def layer(number: int) -> ModuleSpec:
        return ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=use.norm,
                self_attention=linear if model.is_linear(number) else attention,
                self_attn_bda=add,
                pre_mlp_layernorm=use.norm,
                mlp=experts if config.num_moe_experts and config.moe_layer_freq[number] else dense,
                mlp_bda=add,
            ),
        )

    first = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules([layer(number) for number in range(first, first + count)], layer_norm=use.norm)


def _attention(use: _Modules, qk_norm: bool) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=use.column,
            core_attention=use.attention,
            linear_proj=use.row,
            q_layernorm=use.norm if qk_norm else IdentityOp,
            k_layernorm=use.norm if qk_norm else IdentityOp,
        ),
    )


def _latent_attention(use: _Modules) -> ModuleSpec:
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=use.column,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=use.column,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=use.column,
            core_attention=use.attention,
            linear_proj=use.row,
            q_layernorm=RmsNorm,
            kv_layernorm=RmsNorm,
        ),
    )
