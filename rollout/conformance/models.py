"""Tiny Hugging Face models with random weights, which the suite makes and engines generate with, and the oracle for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..contract.requests import Sampling

VOCABULARY = 97
"""Tokens of every model: odd, so that an engine that pads its embedding shows it."""
PROMPT = (5, 6, 7, 8)
"""Prompt after which every model has its end-of-sequence token as the third most probable continuation in a row."""
_ARCHITECTURES = {
    "qwen3": ("Qwen3Config", "tied embeddings"),
    "qwen3-untied": ("Qwen3Config", "a head of its own"),
    "gpt-neox": ("GPTNeoXConfig", "queries, keys and values in one tensor, and biases"),
}
"""The configuration class of each model, and the reason why the suite has the model, by name."""
MODELS = tuple(_ARCHITECTURES)
"""Names of the models."""
_HIDDEN, _HEADS, _HEAD_DIM = 64, 2, 32


def make_model(name: str, seed: int, directory: Path, *, tokenizer: bool = True) -> Path:
    """Write the model `name`, one of `MODELS`, with weights from `seed`, to a new folder in `directory`, and return that.

    Weights are float32, and so large that greedy decoding differs between seeds at once. The tokenizer writes token 7 as
    ``w07``, with a space between words.
    """
    import transformers  # noqa: PLC0415 - an extra

    path = directory / f"{name}-{seed}{'' if tokenizer else '-without-tokenizer'}"
    config = getattr(transformers, _ARCHITECTURES[name][0])(**_settings(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * MODELS.index(name) + seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # norms begin as ones and biases as zeros: one that is never replaced would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    # A completion does not end at this token, which only shows if it occurs.
    model.config.eos_token_id = model.generation_config.eos_token_id = _third_token(model)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    if tokenizer:
        make_tokenizer().save_pretrained(path)
    return path


def make_tokenizer() -> Any:
    """Make the tokenizer of every model."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra
    from tokenizers.models import WordLevel  # noqa: PLC0415 - as above
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    words = {f"w{token:02}": token for token in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w00")))  # noqa: S106 - no password


@torch.no_grad()
def _third_token(model: Any) -> int:
    ids = list(PROMPT)
    for _ in range(3):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-1]


def _settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": name == "qwen3",
    }
    if name == "gpt-neox":
        return settings
    return {**settings, "num_key_value_heads": _HEADS, "head_dim": _HEAD_DIM}


class Reference:
    """The oracle: plain transformers in float32, loaded from a version's files, one forward pass without a cache."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits after each of `ids`, float64 [tokens, vocabulary]."""
        logits: torch.Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0].double()

    def distributions(self, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """Compute the log-probabilities that `sampling` draws each of `tokens` from, float64 [tokens, vocabulary].

        Tokens that it cannot draw have minus infinity.
        """
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        return torch.stack([_distribution(row, sampling) for row in logits])


def _distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The log-probabilities of one next token: temperature first, then `top_k`, then `top_p` of what is left."""
    if sampling.greedy:
        return logits.log_softmax(-1)
    order = (logits / sampling.temperature).sort(descending=True)
    kept = order.values.clone()
    if sampling.top_k:
        kept[sampling.top_k :] = -torch.inf
    probabilities = kept.softmax(-1)
    kept[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = -torch.inf
    return torch.full_like(logits, -torch.inf).scatter(0, order.indices, kept.log_softmax(-1))
