"""Linear attention by the gated delta rule (Yang et al., arXiv 2412.06464) over packed sequences, as Qwen3-Next has it.

megatron-core 0.16.1 has such a layer, too, but for no packed sequences.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ..model_facts import DeltaShape
from ..rows import PackedRow

_LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys; transformers has no setting for it."""


class GatedDeltaNet(torch.nn.Module):
    """A layer of linear attention. Tensor parallelism splits it by heads of keys, each with its heads of values.

    It needs sequence parallelism with tensor parallelism: only then is the gradient of the norm, whose weight all heads share,
    summed over the ranks.
    """

    def __init__(self, config: TransformerConfig, delta: DeltaShape, **_: Any) -> None:
        super().__init__()
        self._ranks, self._eps = config.tensor_model_parallel_size, config.layernorm_epsilon
        self._heads, self._delta = delta.key_heads // self._ranks, delta
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        by_rows = partial(ColumnParallelLinear, config.hidden_size, **linear, gather_output=False)
        values = delta.convolved[2]
        self.in_proj_qkvz = by_rows(sum(delta.convolved) + values)
        self.in_proj_ba = by_rows(2 * delta.value_heads)
        self.out_proj = RowParallelLinear(
            values, config.hidden_size, **linear, input_is_parallel=True, skip_bias_add=True
        )
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        new = partial(torch.empty, dtype=config.params_dtype, device=device)
        self.conv_weight = torch.nn.Parameter(new(sum(delta.convolved) // self._ranks, 1, delta.kernel))
        self.dt_bias = torch.nn.Parameter(new(delta.value_heads // self._ranks))
        self.log_decay = torch.nn.Parameter(new(delta.value_heads // self._ranks))
        for split in (self.conv_weight, self.dt_bias, self.log_decay):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.norm_weight = torch.nn.Parameter(new(delta.value_dim))
        self.norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's mark

    def forward(
        self, hidden: torch.Tensor, *_: Any, packed_seq_params: PackedRow, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Map [tokens, 1, width], with sequence parallelism this rank's tokens, to the same shape; None for the bias."""
        delta, offsets = self._delta, packed_seq_params.cu_seqlens_q
        shared = delta.value_heads // delta.key_heads
        values = shared * delta.value_dim
        fused = self.in_proj_qkvz(hidden)[0].view(-1, self._heads, 2 * (delta.key_dim + values))
        query, key, value, gate = torch.split(fused, [delta.key_dim, delta.key_dim, values, values], dim=-1)
        strength, step = self.in_proj_ba(hidden)[0].view(-1, self._heads, 2 * shared).chunk(2, dim=-1)
        mixed = torch.cat([each.flatten(1) for each in (query, key, value)], dim=1)
        mixed = functional.silu(_convolved(mixed, self.conv_weight.squeeze(1), offsets))
        query, key, value = torch.split(mixed, [rows // self._ranks for rows in delta.convolved], dim=1)
        query, key = (
            _unit(each.view(-1, self._heads, delta.key_dim)).repeat_interleave(shared, dim=1) for each in (query, key)
        )
        value, gate = (each.reshape(len(mixed), -1, delta.value_dim) for each in (value, gate))
        decay = -self.log_decay.float().exp() * functional.softplus(step.flatten(1).float() + self.dt_bias)
        found = _delta_rule(query, key, value, decay, strength.flatten(1).sigmoid(), offsets)
        normal = functional.rms_norm(found.float(), (delta.value_dim,), eps=self._eps)
        found = self.norm_weight * normal.to(hidden.dtype) * functional.silu(gate.float())
        output, _bias = self.out_proj(found.to(hidden.dtype).flatten(1)[:, None])
        return output, None


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Return [..., width] with length 1, in float32."""
    heads = heads.float()
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _convolved(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Convolve each channel of [tokens, channels] with its weight [channels, kernel], within each sequence and causally."""
    lengths = offsets.diff()
    positions = torch.arange(len(rows), device=rows.device) - offsets[:-1].repeat_interleave(lengths)
    kernel = weight.shape[1]
    return torch.stack(
        [
            torch.where((positions >= back)[:, None], rows.roll(back, 0), 0) * weight[:, kernel - 1 - back]
            for back in range(kernel)
        ]
    ).sum(0)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """Compute the rule for each sequence: by fla's kernel on a GPU, else by torch in megatron-core.

    Args:
        query: [tokens, heads, key width], of length 1.
        key: Likewise.
        value: [tokens, heads, value width].
        decay: float32 [tokens, heads], the logarithm of the share of the state that is kept.
        strength: [tokens, heads], the share of a value that replaces what the state has for the key.
        offsets: int32 [sequences + 1], where each sequence begins, and the number of tokens.

    Returns:
        [tokens, heads, value width].
    """
    tensors = (query.to(value.dtype), key.to(value.dtype), value, decay, strength)
    if gated_delta_net.HAVE_FLA and value.is_cuda:
        q, k, v, g, beta = (each[None].contiguous() for each in tensors)
        starts = offsets.long()
        packed: torch.Tensor = gated_delta_net.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=starts)[0]
        return packed[0]
    lengths = offsets.diff().tolist()
    q, k, v, g, beta = (pad_sequence(list(torch.split(each, lengths)), batch_first=True) for each in tensors)
    found, _ = gated_delta_net.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    return torch.cat([each[:length] for each, length in zip(found, lengths, strict=True)])
