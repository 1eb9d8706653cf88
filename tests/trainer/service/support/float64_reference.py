"""Batches of clients, and what a model with an adapter makes of them in float64, by plain torch."""

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


def reference(
    model: Path, adapter: dict[str, torch.Tensor], rank: int, seed: int
) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Log-probabilities, loss and gradients by A and B, in float64, from weights to which B A is added."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    matrices = {name: tensor.double().requires_grad_() for name, tensor in adapter.items()}
    weights = dict(plain.named_parameters())
    for name, weight in weights.items():
        a = matrices.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
        if a is not None:
            b = matrices[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
            weights[name] = weight.detach() + ALPHA / rank * b @ a
    logprobs, loss = [], torch.zeros((), dtype=torch.float64)
    for tokens, each in sequences(seed):
        logits = functional_call(plain, weights, (torch.tensor([tokens[:-1]]),), {"use_cache": False}).logits[0]
        found = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
        logprobs.append(found.detach())
        loss = loss - (found * torch.tensor(each, dtype=torch.float64)).sum()
    loss.backward()
    return logprobs, float(loss.detach()), {name: each.grad for name, each in matrices.items() if each.grad is not None}
