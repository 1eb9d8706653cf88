"""Tiny random checkpoints in Hugging Face format, and transformers' own greedy decoding on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from quantised_reference import reference_fp8, restored
from safetensors.torch import load_file, save_file

from weightlane.sync.codecs.quantised import quantization_config, scale_name

VOCAB = 320
HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 128
PLAIN_DIM, VALUE_DIM = 32, 16
"""Sizes per head in latent attention: keys without positions, and values."""


def make_qwen3(
    path: Path, *, seed: int, tied: bool = False, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> Path:
    """A tiny Qwen3 whose weights depend on `seed` only."""
    config = transformers.Qwen3Config(head_dim=HEAD_DIM, **_sizes(tied, vocab))
    return _save(transformers.Qwen3ForCausalLM, config, path, seed, dtype)


def make_blocky_qwen3(path: Path, *, seed: int, ranks: int = 1) -> Path:
    """A tiny Qwen3 in bfloat16; on each of `ranks` all parts of fused tensors have a multiple of 128 rows.

    That is what vLLM asks of fp8 checkpoints.
    """
    sizes = _sizes(False, VOCAB) | {"hidden_size": 128, "intermediate_size": 256}
    config = transformers.Qwen3Config(head_dim=64 * ranks, **sizes)
    return _save(transformers.Qwen3ForCausalLM, config, path, seed, torch.bfloat16)


def copy_with(tensors: Mapping[str, torch.Tensor], model: Path, path: Path) -> Path:
    """The checkpoint that `model` is with other tensors."""
    shutil.copytree(model, path)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})
    return path


def quantised_copy(model: Path, path: Path) -> Path:
    """The checkpoint that `model` is in fp8, made without the package's quantisers."""
    tensors = load_tensors(model)
    for name in [name for name in tensors if "_proj." in name]:
        tensors[name], tensors[scale_name(name)] = reference_fp8(tensors[name])
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = quantization_config(["lm_head"])
    copy_with(tensors, model, path).joinpath("config.json").write_text(json.dumps(config))
    return path


def left_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise and restore a checkpoint's projections with the reference quantiser; other tensors stay as they are."""
    return {name: restored(tensor) if "_proj." in name else tensor for name, tensor in tensors.items()}


def make_llama(
    path: Path, *, seed: int, tied: bool = False, dtype: torch.dtype = torch.float32, vocab: int = VOCAB
) -> Path:
    """A tiny Llama whose weights depend on `seed` only."""
    config = transformers.LlamaConfig(head_dim=HEAD_DIM, **_sizes(tied, vocab))
    return _save(transformers.LlamaForCausalLM, config, path, seed, dtype)


def make_qwen3_moe(path: Path, *, seed: int, vocab: int = VOCAB, experts: int = 8, normalised: bool = True) -> Path:
    """A tiny Qwen3 mixture of experts, two for each token, whose weights depend on `seed` only.

    In real ones the weights of a token's experts are normalised to a sum of one.
    """
    config = transformers.Qwen3MoeConfig(
        head_dim=HEAD_DIM,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=INTERMEDIATE // 2,
        decoder_sparse_step=1,
        norm_topk_prob=normalised,
        **_sizes(False, vocab),
    )
    return _save(transformers.Qwen3MoeForCausalLM, config, path, seed, torch.float32)


def make_mla_moe(path: Path, *, seed: int, vocab: int = VOCAB, experts: int = 8) -> Path:
    """A tiny DeepSeek-V3: latent attention, and experts, two for each token, of one of two groups, after a dense layer."""
    config = transformers.DeepseekV3Config(
        **_sizes(False, vocab) | {"num_key_value_heads": HEADS},
        q_lora_rank=48,
        kv_lora_rank=512,  # vLLM attends to 512 and 64 only
        qk_nope_head_dim=PLAIN_DIM,
        qk_rope_head_dim=64,
        v_head_dim=VALUE_DIM,
        n_routed_experts=experts,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",  # transformers knows no other, and vLLM asks for it
        scoring_func="sigmoid",
        moe_intermediate_size=INTERMEDIATE // 4,
        first_k_dense_replace=1,
    )
    return _save(transformers.DeepseekV3ForCausalLM, config, path, seed, torch.float32)


def add_tokenizer(path: Path, vocab: int = VOCAB) -> None:
    """A tokenizer that fits a model from here: token ``n`` is the word ``w<n>``."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    special = {"eos_token": f"w{vocab - 2}", "pad_token": f"w{vocab - 1}"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its name on disk."""
    files = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


@torch.no_grad()
def greedy_tokens(path: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that transformers decodes greedily in float32, one full forward pass per token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(_model(path)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def is_greedy(path: Path, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether `tokens` are what `greedy_tokens` gives: each the most probable after those before it, in one forward pass."""
    return _logits(path, prompt, tokens).argmax(-1).tolist() == list(tokens)


def check_switch(completion: Any, prompt: Sequence[int], old: Path, new: Path) -> None:
    """The model of one version has decoded a completion up to some token, and that of the next the others: the stamps say so."""
    first, tokens = completion.versions[0], completion.token_ids
    boundary = completion.versions.index(first + 1)
    assert completion.versions == [first] * boundary + [first + 1] * (len(tokens) - boundary)
    assert is_greedy(old, prompt, tokens[:boundary])
    assert is_greedy(new, [*prompt, *tokens[:boundary]], tokens[boundary:])


def described(tensor: torch.Tensor) -> list[object]:
    """Data type, shape and every byte, as JSON."""
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), raw.hex()]


def check_ranks(
    ranks: Sequence[Mapping[str, list[object]]], tensors: Mapping[str, torch.Tensor], *, expert_parallel: bool = False
) -> None:
    """Every live parameter of every rank, `described`, is that of a checkpoint, bit for bit."""
    for rank, live in enumerate(ranks):
        wanted = vllm_parameters(tensors, rank=rank, world=len(ranks), expert_parallel=expert_parallel)
        assert live.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert live[name] == described(tensor), f"{name} on rank {rank}"


def vllm_parameters(
    tensors: Mapping[str, torch.Tensor], *, rank: int = 0, world: int = 1, expert_parallel: bool = False
) -> dict[str, torch.Tensor]:
    """Compute what rank `rank` of `world` of vLLM's Qwen3, Llama, Qwen3-MoE or DeepSeek-V3 must hold, without vLLM's loaders.

    Queries, keys and values, and gate and up, are fused by rows; heads, intermediate units and the vocabulary are divided
    between ranks by rows, the two output projections by columns; norms are whole everywhere. The vocabulary is padded with
    zero rows to a multiple of 64 first. Experts are divided like other layers, or each rank has as many whole ones, in order.
    Latent attention's down projections are fused and whole; its up projections are divided by heads. The one of keys and values
    is there a second time, split by head into keys and transposed values.
    """
    rows = {name: _part(tensor, 0, rank, world) for name, tensor in tensors.items()}
    wanted = _stacked_experts(tensors, rank, world, expert_parallel=expert_parallel)
    for name, tensor in tensors.items():
        if ".experts." in name or name.endswith("mlp.gate.weight"):
            continue
        head, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf == "kv_b_proj":
            wanted |= _absorbed(f"{head}.mla_attn.mla_attn", rows[name])
        if leaf in _FUSED:
            fused, leaves = _FUSED[leaf]
            held = tensors if leaf == "q_a_proj" else rows
            wanted[f"{head}.{fused}.weight"] = torch.cat([held[f"{head}.{each}.weight"] for each in leaves])
        elif leaf in ("k_proj", "v_proj", "up_proj", "kv_a_proj_with_mqa"):
            continue
        elif leaf in ("q_b_proj", "kv_b_proj"):
            wanted[name] = rows[name]
        elif leaf in ("o_proj", "down_proj"):
            wanted[name] = _part(tensor, 1, rank, world)
        elif leaf in ("embed_tokens", "lm_head"):
            padding = -tensor.shape[0] % 64
            wanted[name] = _part(torch.nn.functional.pad(tensor, (0, 0, 0, padding)), 0, rank, world)
        else:
            wanted[name] = tensor
    return wanted


_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "q_a_proj": ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
}
"""The first of several tensors that are one parameter, what that is called, and all of them."""


def _absorbed(attention: str, projection: torch.Tensor) -> dict[str, torch.Tensor]:
    """Derive latent attention's parameters from a rank's key-value projection, whose rows are by head, keys before values."""
    by_head = projection.view(-1, PLAIN_DIM + VALUE_DIM, projection.shape[1])
    keys, values = by_head.split([PLAIN_DIM, VALUE_DIM], dim=1)
    return {f"{attention}.W_UK_T": keys, f"{attention}.W_UV": values.transpose(1, 2)}


def _stacked_experts(
    tensors: Mapping[str, torch.Tensor], rank: int, world: int, *, expert_parallel: bool
) -> dict[str, torch.Tensor]:
    """Experts of a layer stacked, gate and up projections on top of each other, and routers."""
    wanted = {name: tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
    for router in list(wanted):
        prefix, count = router.replace("gate.weight", "experts"), len(tensors[router])
        held = range(count)[rank * count // world : (rank + 1) * count // world] if expert_parallel else range(count)
        rank_, world_ = (0, 1) if expert_parallel else (rank, world)
        gates, ups, downs = (
            [_part(tensors[f"{prefix}.{expert}.{which}_proj.weight"], dim, rank_, world_) for expert in held]
            for which, dim in (("gate", 0), ("up", 0), ("down", 1))
        )
        wanted[f"{prefix}.routed_experts.w13_weight"] = torch.stack(
            [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        )
        wanted[f"{prefix}.routed_experts.w2_weight"] = torch.stack(downs)
    return wanted


def _part(tensor: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    if tensor.shape[dim] % world:
        return tensor
    return tensor.chunk(world, dim)[rank].contiguous()


def _sizes(tied: bool, vocab: int) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": vocab - 2,
        "pad_token_id": vocab - 1,
        "bos_token_id": None,
        # Large enough that greedy decoding does not sit in ties and differs between seeds at once.
        "initializer_range": 0.2,
    }


def _save(model_class: type, config: object, path: Path, seed: int, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        # Norms start as ones, so a norm that is never replaced would go unnoticed.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        for name, buffer in model.named_buffers():  # zeros, too
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.uniform_(buffer, 0.1, 0.9)
    model.to(dtype).save_pretrained(path)
    return path


_loaded: dict[Path, torch.nn.Module] = {}


def _model(path: Path) -> torch.nn.Module:
    if path not in _loaded:
        _loaded[path] = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return _loaded[path]


@torch.no_grad()
def _logits(path: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits that predict each of `tokens` from `prompt` and the tokens before it."""
    logits: torch.Tensor = _model(path)(torch.tensor([[*prompt, *tokens]])).logits
    return logits[0, len(prompt) - 1 : -1]


def make_architecture(kind: str, path: Path, *, seed: int = 0) -> Path:
    """A tiny model of one of several architectures, in float32.

    ``bloom`` interleaves queries, keys and values per head, ``mixtral`` has experts, and ``mamba2`` has a parameter that loading
    computes something from.
    """
    if kind == "qwen3-tied":
        return make_qwen3(path, seed=seed, tied=True, vocab=300)
    if kind == "llama":
        return make_llama(path, seed=seed, vocab=300)
    t, sizes = transformers, _sizes(False, 300)
    small = {"vocab_size": 300, "hidden_size": HIDDEN, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    layers = {"n_layer": LAYERS, "n_head": HEADS}
    model, config = {
        "mixtral": lambda: (
            t.MixtralForCausalLM,
            t.MixtralConfig(head_dim=HEAD_DIM, num_local_experts=4, num_experts_per_tok=2, **sizes),
        ),
        "bloom": lambda: (t.BloomForCausalLM, t.BloomConfig(**layers, **small)),
        "mamba2": lambda: (
            t.Mamba2ForCausalLM,
            t.Mamba2Config(num_hidden_layers=LAYERS, num_heads=8, head_dim=16, state_size=16, n_groups=1, **small),
        ),
    }[kind]()
    return _save(model, config, path, seed, torch.float32)
