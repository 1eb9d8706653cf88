"""One architecture of the zoo: the sizes of its tiny config, and its checkpoint with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 64, 4, 2, 16, 128, 300


def common(layers: int) -> dict[str, Any]:
    """Return a tiny model's sizes under the names that most transformers configs use."""
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
    """Name of the config class in transformers, without ``Config``."""
    group: str
    """dense, moe, mla, state space or hybrid."""
    sizes: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    shared: bool = True
    """Whether it takes the sizes of `common`."""
    backend: str = "vllm"
    """``transformers`` where vLLM is to run transformers' own class."""
    model: str = ""
    """Name of the model class in transformers; if empty, `config` followed by ``ForCausalLM``."""

    runner: str = "auto"
    """vLLM's ``runner``: ``pooling`` for a model that is served for embeddings, scores or classes."""

    def transformers_config(self) -> Any:
        """The config of its tiny model. Raises what transformers raises."""
        shared = common(self.layers) if self.shared else {}
        sizes = {
            name: value for name, value in (shared | self.sizes).items() if value is not None or name not in shared
        }
        return getattr(transformers, f"{self.config}Config")(**sizes)

    @property
    def model_class(self) -> Any:
        """Its class in transformers."""
        return getattr(transformers, self.model or f"{self.config}ForCausalLM")

    @property
    def options(self) -> dict[str, str]:
        """Its arguments of vLLM's."""
        return {"model_impl": "transformers" if self.backend == "transformers" else "auto", "runner": self.runner}


def make(kind: Kind, path: Path, *, seed: int, dtype: torch.dtype) -> Path:
    """A checkpoint whose weights depend on `seed` only, with the types that transformers gives them. Raises what it raises."""
    config, model_class = kind.transformers_config(), kind.model_class
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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
