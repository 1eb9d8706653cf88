"""Checkpoints as hubs have them: other names than transformers writes, tensors that nobody reads, tied copies, shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from layout_models import random_bits
from safetensors.torch import load_file, save_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class HubForm:
    """Differences of a checkpoint on a hub from the one that transformers writes."""

    kind: str
    """The architecture, in the zoo."""
    without: str = ""
    """A prefix that its names lack."""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of further tensors, which the architecture does not use."""
    head: bool = False
    """Whether it holds the tied head as well, equal to the embedding."""
    shards: int = 1
    folder: str = "hub"

    def files(self, version: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of its files when the model is that of `version`, which has transformers' names."""
        found = {name.removeprefix(self.without): tensor for name, tensor in version.items()}
        if self.head:
            found[HEAD] = found[EMBEDDING].clone()
        return found | self._extra(version)

    def with_unread(self, version: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The version of a trainer that has the further tensors, too, with its names, and a buffer that no file has."""
        extra = self._extra(version) | {"layers.0.rotary_emb.inv_freq": torch.rand(4)}
        return {**version, **{f"{self.without}{name}": tensor for name, tensor in extra.items()}}

    def _extra(self, version: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        narrow = next(iter(version.values())).dtype
        return {name: random_bits(shape, narrow, seed=len(name)) for name, shape in self.extra.items()}

    def cut(self, model: Path) -> Path:
        """Write the one file of `model` as several, with an index, if the form is so."""
        if self.shards == 1:
            return model
        whole = load_file(model / "model.safetensors")
        place = {name: f"model-{number % self.shards}.safetensors" for number, name in enumerate(whole)}
        for file in set(place.values()):
            save_file({name: whole[name] for name in whole if place[name] == file}, model / file, {"format": "pt"})
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
        (model / "model.safetensors").unlink()
        return model


def _layers(name: str, shape: tuple[int, ...], count: int = 2) -> dict[str, tuple[int, ...]]:
    return {name.format(layer): shape for layer in range(count)}


HUB_FORMS = {
    "gpt2": HubForm("gpt2", "transformer.", _layers("h.{}.attn.bias", (1, 1, 256, 256))),
    "pythia": HubForm(
        "gpt-neox",
        extra=_layers("gpt_neox.layers.{}.attention.bias", (1, 1, 256, 256))
        | _layers("gpt_neox.layers.{}.attention.masked_bias", ()),
    ),
    "bloom": HubForm("bloom", "transformer."),
    "further-tokens": HubForm("qwen3-next", extra={"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}),
    "shared-kv": HubForm(
        "gemma4",
        extra={f"model.layers.{layer}.self_attn.{name}_proj.weight": (32, 64) for layer in (2, 3) for name in "kv"},
    ),
    "tied-copy": HubForm("qwen3-tied", head=True),
    "shards": HubForm("qwen3-moe", shards=3, folder="modèle 模型"),
}
