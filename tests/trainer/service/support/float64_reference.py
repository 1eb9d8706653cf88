"""Batches of clients, and a model whose adapter plain torch trains on them in float64."""

from __future__ import annotations

import random
from pathlib import Path

import torch
import transformers
from torch.func import functional_call

VOCAB, ALPHA = 304, 32.0


def sequences(seed: int, count: int = 4) -> list[tuple[list[int], list[float]]]:
    """Tokens, one more than the model reads, and a weight for each that is predicted."""
    draws = random.Random(seed)
    lengths = [draws.randrange(2, 12) for _ in range(count)]
    return [
        ([draws.randrange(VOCAB) for _ in range(n + 1)], [draws.choice([0.0, 1.0, 0.5]) for _ in range(n)])
        for n in lengths
    ]


class Float64Model:
    """A model whose adapter plain torch trains in float64, as a client should train it through the service.

    Args:
        model: Checkpoint.
        begun: The adapter's matrices by PEFT's names.
        rank: The adapter's rank.
        adam: Settings of the optimizer, as the SDK names them.
    """

    def __init__(self, model: Path, begun: dict[str, torch.Tensor], rank: int, adam: dict[str, float]) -> None:
        self._plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
        self._scale = ALPHA / rank
        self.trained = {name: each.double().requires_grad_() for name, each in begun.items()}
        betas = adam["beta1"], adam["beta2"]
        self._optimizer = torch.optim.AdamW(self.trained.values(), 1e-2, betas, adam["eps"], adam["weight_decay"])

    def step(self, seed: int, clip_norm: float) -> tuple[torch.Tensor, float]:
        """Take a step on `sequences(seed)`; returns the log-probabilities of all targets, and the loss."""
        self._optimizer.zero_grad()
        rows = sequences(seed)
        logprobs = torch.cat([self._logprobs(tokens) for tokens, _ in rows])
        loss = -(logprobs * torch.tensor([each for _, weights in rows for each in weights])).sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), clip_norm)
        self._optimizer.step()
        return logprobs.detach(), float(loss.detach())

    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        weights = dict(self._plain.named_parameters())
        for name, weight in weights.items():
            lora = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{lora}A.weight" in self.trained:
                a, b = self.trained[f"{lora}A.weight"], self.trained[f"{lora}B.weight"]
                weights[name] = weight.detach() + self._scale * b @ a
        inputs = (torch.tensor([tokens[:-1]]),)
        logits = functional_call(self._plain, weights, inputs, {"use_cache": False}).logits[0]
        return torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
