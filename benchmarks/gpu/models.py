"""Models of a Hugging Face cache that fit on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

SHARE_OF_MEMORY = 1 / 10
"""Largest share of a GPU's memory that a model's files may have.

vLLM takes half of the memory. The rest holds the model's and the trainer's weights, a snapshot, and up to two staged versions.
"""


def cached_models(hub: Path, largest_bytes: float) -> dict[str, Path]:
    """Causal language models of at most `largest_bytes` in `hub`, the folder of a Hugging Face cache that has the models.

    Returns name and directory, the smallest first, at most two.
    """
    found = []
    for folder in sorted(hub.glob("models--*/snapshots/*")):
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
        if causal and "quantization_config" not in config and 0 < sum(sizes) <= largest_bytes:
            found.append((sum(sizes), name_of(folder), folder))
    found.sort(key=lambda each: each[:2])
    chosen = [found[0], found[-1]] if len(found) > 1 else found
    return {name: folder for _, name, folder in chosen}


def name_of(model: Path) -> str:
    """``owner/name`` of a directory in a Hugging Face cache; the last part of any other path."""
    model = model.absolute()
    if model.parent.name == "snapshots":
        return model.parents[1].name.removeprefix("models--").replace("--", "/")
    return model.name
