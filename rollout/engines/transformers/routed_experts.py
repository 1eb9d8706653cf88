"""Records the experts that a model of transformers routes tokens to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightlane.ckpt_engines import ConfigError

_EXPERTS = re.compile(r"layers\.(\d+)\..*\bexperts")
"""Name of the experts of a decoder layer. They are called with hidden states, [tokens, width], and the indices and the weights of
each token's experts, both [tokens, experts per token]."""


def expert_modules(model: Any, part: str) -> dict[int, torch.nn.Module]:
    """Return the modules of all experts of each decoder layer that has some. Raises `ConfigError` if no layer does."""
    named = ((_EXPERTS.search(name), module) for name, module in model.named_modules() if name.endswith(".experts"))
    found = {int(match[1]): module for match, module in named if match}
    if not found:
        raise ConfigError(
            f"algorithm.router_replay is true, and {type(model).__name__} has no layer with experts that are known here.",
            part=part,
            hint="Set algorithm.router_replay to false.",
        )
    return found


@contextmanager
def recorded_experts(model: Any, tokens: int) -> Iterator[npt.NDArray[np.int16]]:
    """Record the experts of a forward pass over one sequence of `tokens`: [tokens, decoder layers, experts per token].

    The array is filled as the pass goes on; layers without experts stay -1.
    """
    modules, config = expert_modules(model, "rollout"), model.config.get_text_config()
    found = np.full((tokens, config.num_hidden_layers, config.num_experts_per_tok), -1, np.int16)

    def record(layer: int, _: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        found[:, layer] = arguments[1].cpu().numpy()

    hooks = [module.register_forward_pre_hook(partial(record, layer)) for layer, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
