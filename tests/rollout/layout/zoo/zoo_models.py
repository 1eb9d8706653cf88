"""Tiny checkpoints of every architecture of the zoo, with random weights.

A row names transformers' config class and what makes it small. Sizes that most of them share come from `common`; a value of
None takes one of those out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 16, 128, 300


def common(layers: int) -> dict[str, Any]:
    """What most configs call their sizes."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


@dataclass(frozen=True)
class Kind:
    """One architecture."""

    name: str
    config: str
    """Of transformers, without ``Config``."""
    group: str
    """dense, moe, mla, state space or hybrid."""
    sizes: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    shared: bool = True
    """Whether it takes the sizes of `common`."""
    backend: str = "vllm"
    """``transformers`` where vLLM is to run transformers' own class."""
    model: str = ""
    """Of transformers, where it is not the config's name and ``ForCausalLM``."""

    @property
    def impl(self) -> str:
        """vLLM's ``model_impl``."""
        return "transformers" if self.backend == "transformers" else "auto"


_GPT = {"n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": HEAD_DIM,
}
_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_key_value_heads",
    "head_dim",
)
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
_GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

ZOO = [
    Kind("llama", "Llama", "dense"),
    Kind("llama-biases", "Llama", "dense", {"attention_bias": True, "mlp_bias": True}),
    Kind("llama-tied", "Llama", "dense", {"tie_word_embeddings": True}),
    Kind("llama-transformers", "Llama", "dense", backend="transformers"),
    Kind("mistral-window", "Mistral", "dense", {"sliding_window": 32, "head_dim": HEAD_DIM}),
    Kind("qwen2", "Qwen2", "dense"),
    Kind("qwen3", "Qwen3", "dense", {"head_dim": HEAD_DIM}),
    Kind("qwen3-tied", "Qwen3", "dense", {"head_dim": HEAD_DIM, "tie_word_embeddings": True}),
    Kind("qwen3-transformers", "Qwen3", "dense", {"head_dim": HEAD_DIM}, backend="transformers"),
    Kind("gemma", "Gemma", "dense", {"head_dim": HEAD_DIM, "tie_word_embeddings": True}),
    Kind("gemma2", "Gemma2", "dense", {"head_dim": HEAD_DIM, "sliding_window": 32, "tie_word_embeddings": True}),
    Kind(
        "gemma3",
        "Gemma3Text",
        "dense",
        {"head_dim": HEAD_DIM, "sliding_window": 32, "tie_word_embeddings": True},
        model="Gemma3ForCausalLM",
    ),
    Kind("gemma2-transformers", "Gemma2", "dense", {"head_dim": HEAD_DIM}, backend="transformers"),
    Kind(
        "gemma3n",
        "Gemma3nText",
        "dense",
        {
            "head_dim": HEAD_DIM,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        model="Gemma3nForCausalLM",
    ),
    Kind(
        "gemma4",
        "Gemma4Text",
        "dense",
        {
            "head_dim": HEAD_DIM,
            "global_head_dim": HEAD_DIM,
            "tie_word_embeddings": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
        },
        model="Gemma4ForCausalLM",
    ),
    Kind("phi", "Phi", "dense"),
    Kind("phi3", "Phi3", "dense"),
    Kind("gpt2", "GPT2", "dense", {**_GPT, "n_positions": 256}, shared=False, model="GPT2LMHeadModel"),
    Kind("gpt-neox", "GPTNeoX", "dense", {"num_key_value_heads": None}),
    Kind(
        "gptj",
        "GPTJ",
        "dense",
        {**_GPT, "n_positions": 256, "rotary_dim": 8, "tie_word_embeddings": False},
        shared=False,
    ),
    Kind("persimmon", "Persimmon", "dense"),
    Kind("jais2", "Jais2", "dense", {"head_dim": HEAD_DIM}),
    Kind("ministral3", "Ministral3", "dense", {"head_dim": HEAD_DIM}),
    Kind("starcoder", "GPTBigCode", "dense", {**_GPT, "n_positions": 256}, shared=False),
    Kind("starcoder2", "Starcoder2", "dense"),
    Kind("opt", "OPT", "dense", {"ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN, "intermediate_size": None}),
    Kind(
        "bloom",
        "Bloom",
        "dense",
        {
            "hidden_size": HIDDEN,
            "n_layer": 2,
            "n_head": HEADS,
            "vocab_size": VOCAB,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        shared=False,
    ),
    Kind("falcon", "Falcon", "dense", {"new_decoder_architecture": False, "multi_query": True}),
    Kind("falcon-new", "Falcon", "dense", {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
    Kind("stablelm", "StableLm", "dense"),
    Kind("olmo", "Olmo", "dense"),
    Kind("olmo2", "Olmo2", "dense"),
    Kind("olmo3-window", "Olmo3", "dense", {"sliding_window": 32}),
    Kind("cohere", "Cohere", "dense", {"tie_word_embeddings": True}),
    Kind("cohere2-window", "Cohere2", "dense", {"sliding_window": 32, "tie_word_embeddings": True}),
    Kind("granite", "Granite", "dense"),
    Kind("nemotron", "Nemotron", "dense"),
    Kind("exaone4", "Exaone4", "dense", {"sliding_window": 32}),
    Kind("glm", "Glm", "dense", {"head_dim": HEAD_DIM}),
    Kind("glm4", "Glm4", "dense", {"head_dim": HEAD_DIM}),
    Kind("ernie", "Ernie4_5", "dense"),
    Kind("hunyuan", "HunYuanDenseV1", "dense", {"head_dim": HEAD_DIM}),
    Kind("smollm3", "SmolLM3", "dense"),
    Kind("arcee", "Arcee", "dense"),
    Kind("apertus", "Apertus", "dense"),
    Kind("seed-oss", "SeedOss", "dense", {"head_dim": HEAD_DIM}),
    Kind("helium-transformers", "Helium", "dense", {"head_dim": HEAD_DIM}, backend="transformers"),
    Kind("mixtral", "Mixtral", "moe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Kind(
        "mixtral-transformers",
        "Mixtral",
        "moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        backend="transformers",
    ),
    Kind("qwen2-moe", "Qwen2Moe", "moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    Kind("qwen3-moe", "Qwen3Moe", "moe", {**_EXPERTS, "head_dim": HEAD_DIM}),
    Kind("olmoe", "Olmoe", "moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Kind("phimoe", "Phimoe", "moe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Kind("granite-moe", "GraniteMoe", "moe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Kind(
        "granite-moe-shared",
        "GraniteMoeShared",
        "moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    ),
    Kind(
        "afmoe",
        "Afmoe",
        "moe",
        {
            **_EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "head_dim": HEAD_DIM,
            "sliding_window": 32,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Kind("flex-olmo", "FlexOlmo", "moe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Kind("cohere2-moe", "Cohere2Moe", "moe", {**_EXPERTS, "head_dim": HEAD_DIM, "tie_word_embeddings": True}),
    Kind("hunyuan-moe", "HunYuanMoEV1", "moe", {"num_experts": 4, "moe_topk": 2, "head_dim": HEAD_DIM}),
    Kind(
        "exaone-moe",
        "ExaoneMoe",
        "moe",
        {
            **_EXPERTS,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "head_dim": HEAD_DIM,
            "sliding_window": 32,
        },
    ),
    Kind(
        "ernie-moe",
        "Ernie4_5_Moe",
        "moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    Kind(
        "gpt-oss",
        "GptOss",
        "moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": HEAD_DIM, "sliding_window": 32},
    ),
    Kind("glm4-moe", "Glm4Moe", "moe", _ROUTED),
    Kind("dots1", "Dots1", "moe", _ROUTED),
    Kind("minicpm3", "MiniCPM3", "mla", {name: _MLA[name] for name in _LATENT}),
    Kind("deepseek-v2", "DeepseekV2", "mla", _MLA),
    Kind("deepseek-v2-lite", "DeepseekV2", "mla", {**_MLA, "q_lora_rank": None}),
    Kind("glm4-moe-lite", "Glm4MoeLite", "mla", {**_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    Kind("deepseek-v3", "DeepseekV3", "mla", {**_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    Kind(
        "mamba",
        "Mamba",
        "state space",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "state_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        shared=False,
    ),
    Kind(
        "mamba2",
        "Mamba2",
        "state space",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        shared=False,
    ),
    Kind(
        "falcon-mamba",
        "FalconMamba",
        "state space",
        {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "state_size": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        shared=False,
    ),
    Kind("falcon-h1", "FalconH1", "hybrid", {**_MAMBA, "mamba_d_ssm": 128, "head_dim": HEAD_DIM}),
    Kind("bamba", "Bamba", "hybrid", {**_MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]}),
    Kind(
        "granite-hybrid",
        "GraniteMoeHybrid",
        "hybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
        },
    ),
    Kind(
        "jamba",
        "Jamba",
        "hybrid",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    Kind(
        "nemotron-h",
        "NemotronH",
        "hybrid",
        {
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "head_dim": HEAD_DIM,
        },
        layers=3,
    ),
    Kind(
        "lfm2-moe",
        "Lfm2Moe",
        "hybrid",
        {
            **_EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    Kind("lfm2", "Lfm2", "hybrid", {"layer_types": ["conv", "full_attention"]}),
    Kind(
        "qwen3-next",
        "Qwen3Next",
        "hybrid",
        {
            **_EXPERTS,
            **_GDN,
            "shared_expert_intermediate_size": 64,
            "head_dim": HEAD_DIM,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
]
KINDS = {kind.name: kind for kind in ZOO}


def make(kind: Kind, path: Path, *, seed: int, dtype: torch.dtype) -> Path:
    """A checkpoint whose weights depend on `seed` only, with the types that transformers gives them. Raises what it raises."""
    shared = common(kind.layers) if kind.shared else {}
    sizes = {name: value for name, value in {**shared, **kind.sizes}.items() if value is not None or name not in shared}
    config = getattr(transformers, f"{kind.config}Config")(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_class = getattr(transformers, kind.model or f"{kind.config}ForCausalLM")
        model = model_class(config)
        for name, tensor in model.state_dict().items():
            # Norms, biases and sinks start as constants, so that one that is never replaced would go unnoticed.
            if tensor.is_floating_point() and (tensor.dim() <= 1 or "bias" in name):
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    if dtype != torch.float32:
        # Some tensors stay float32 in some architectures.
        model_class.from_pretrained(path, dtype=dtype).save_pretrained(path)
    return path
