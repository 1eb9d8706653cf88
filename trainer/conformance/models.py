"""Tiny Hugging Face models with random weights, which the suite makes and engines train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 61
"""Tokens of every model: odd, so that the rows of the embedding do not divide by two ranks."""
_END = 3
_ARCHITECTURES = {
    "qwen3": ("Qwen3Config", "tied embeddings"),
    "llama": ("LlamaConfig", "a head of its own"),
    "qwen3_moe": ("Qwen3MoeConfig", "experts, one parameter of which is many tensors on disk"),
    "deepseek_v3": ("DeepseekV3Config", "a tensor that stays float32 and that no optimizer changes"),
    "glm4": ("Glm4Config", "norms of outputs, and gate and up in one tensor"),
    "qwen3_next": ("Qwen3NextConfig", "linear attention, and gates of outputs"),
    "gpt_oss": ("GptOssConfig", "sinks, windows, and experts stacked in tensors, with biases"),
}
"""The configuration class of each model, and the reason why the suite has the model, by name."""
MODELS = ("qwen3", "llama", "qwen3_moe", "deepseek_v3")
"""Names of the models that an engine is tried with unless it says which, as `transformers` names their architectures."""
MODELING = tuple(f"transformers.models.{name}.modeling_{name}" for name in MODELS)
"""Modules of these architectures, which take a second to import."""


def make_model(name: str, directory: Path, **changes: Any) -> Path:
    """Write the model `name`, one of `_ARCHITECTURES`, with a tokenizer, to ``directory/name``, and return that path.

    `changes` are settings of its configuration that replace the usual ones.

    Models have 2 layers, 4 attention heads, 2 of keys and values, and 4 experts if they have any: enough for layouts that
    split each of these by two. Their weights are float32, from a fixed seed, and so large that attention is not uniform.
    """
    import transformers  # noqa: PLC0415 - an extra
    from tokenizers import Tokenizer  # noqa: PLC0415 - as above
    from tokenizers.models import WordLevel  # noqa: PLC0415 - as above

    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, _ARCHITECTURES[name][0])(**{**_settings(name), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(list(_ARCHITECTURES).index(name))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for key, tensor in model.state_dict().items():
            if key.endswith("bias"):  # initialised as zeros, with which an engine that forgets one would pass
                tensor.uniform_(0.1, 0.9)
    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0")),  # noqa: S106 - no password
        eos_token=f"t{_END}",
    )
    path = directory / name
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": _END,
        "initializer_range": 0.2,
        "tie_word_embeddings": name == "qwen3",
    }
    expert_size = 16  # grouped products of torch need rows of a multiple of 16 bytes, also in bfloat16
    more: dict[str, Any] = {}
    match name:
        case "qwen3":
            more = {"head_dim": 8}
        case "qwen3_moe":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": expert_size}
            more = {**experts, "head_dim": 8, "norm_topk_prob": True}
        case "deepseek_v3":
            attention = {
                "kv_lora_rank": 8,
                "q_lora_rank": 6,
                "qk_nope_head_dim": 6,
                "qk_rope_head_dim": 4,
                "v_head_dim": 10,
            }
            experts = {
                "n_routed_experts": 4,
                "n_shared_experts": 2,
                "moe_intermediate_size": expert_size,
                "num_experts_per_tok": 2,
            }
            groups = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
            more = {**attention, **experts, **groups, "num_key_value_heads": 4}
        case "glm4":
            more = {"head_dim": 8, "pad_token_id": None}
        case "qwen3_next":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": expert_size}
            linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
            rest = {"linear_value_head_dim": 4, "shared_expert_intermediate_size": 8, "full_attention_interval": 2}
            # Norms of small values, with the usual epsilon, would make rounding in float32 three times as large.
            sizes = {"head_dim": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-3}
            more = {**experts, **linear, **rest, **sizes}
        case "gpt_oss":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": expert_size}
            window = {"sliding_window": 3, "swiglu_limit": 0.7}
            scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 20.0, "truncate": False}
            yarn = {**scaled, "original_max_position_embeddings": 64, "beta_fast": 4.0}
            more = {**experts, **window, "head_dim": 8, "rope_parameters": yarn}
    return {**settings, **more}
