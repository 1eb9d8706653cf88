"""A task whose completions differ much in length: the multiples of a number, one after the other.

A prompt such as ``37*03=`` has the answer ``730047001110``: 37, 74 and 111 with four digits each, the last digit first. Answers
have 4 to 48 digits, equally many of each length. The model of examples/arithmetic is trained on right answers until it gets some
of the held-out tasks right; reinforcement learning does the rest.
"""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed
from transformers.utils import logging as transformers_logging

from benchmarks.command import say

ROOT = Path(__file__).resolve().parents[2]
NUMBERS, MULTIPLES, DIGITS = 100, 12, 4
"""Numbers are below the first, and have at most so many multiples, of so many digits each."""
LONGEST = DIGITS * MULTIPLES + 1
"""Tokens of the longest answer, its end included."""
CONTEXT = 64
HELDOUT, PROBE = 250, 150
REWARD = '''
def exact_match(completion, task):
    """1.0 for the whole answer and nothing else."""
    return float(completion == task["answer"])
'''


def make_tasks() -> list[dict[str, str]]:
    """Return all tasks, in an order that is always the same."""
    tasks = [
        {
            "prompt": f"{number:02d}*{count:02d}=",
            "answer": "".join(f"{number * each:0{DIGITS}d}"[::-1] for each in range(1, count + 1)),
        }
        for number in range(1, NUMBERS)
        for count in range(1, MULTIPLES + 1)
    ]
    random.Random(0).shuffle(tasks)
    return tasks


class Rows:
    """Tasks with their answers as rows of tokens, padded on the right; their prompts have one length."""

    def __init__(self, tokenizer: Any, tasks: Sequence[dict[str, str]]) -> None:
        rows = [[*tokenizer.encode(task["prompt"] + task["answer"]), tokenizer.eos_token_id] for task in tasks]
        width = max(map(len, rows))
        self._tokens = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        self._prompt = len(tokenizer.encode(tasks[0]["prompt"]))
        self._pad = tokenizer.pad_token_id

    def __len__(self) -> int:
        """The number of tasks."""
        return len(self._tokens)

    def loss(self, model: Any, chosen: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the answers of the `chosen` tasks."""
        logits, targets = self._predicted(model, self._tokens[chosen])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self._pad)

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Share of tasks whose whole answer greedy decoding gives.

        It gives an answer exactly if each of its tokens is the most probable one after those before it: one pass tells.
        """
        logits, targets = self._predicted(model, self._tokens)
        return float(((logits.argmax(-1) == targets) | (targets == self._pad)).all(1).float().mean())

    def _predicted(self, model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and targets after the prompts."""
        logits = model(tokens[:, :-1], use_cache=False).logits[:, self._prompt - 1 :]
        return logits, tokens[:, self._prompt :]


def prepare(folder: Path, *, target: float, most_steps: int) -> Rows:
    """Write tasks, reward and a model with about the held-out accuracy `target` into `folder`; returns the held-out tasks."""
    example = runpy.run_path(str(ROOT / "examples/arithmetic/prepare.py"))
    transformers_logging.disable_progress_bar()
    set_seed(0)
    tokenizer = example["make_tokenizer"]()
    model = example["make_model"](tokenizer, CONTEXT)
    tasks = make_tasks()
    heldout, train = tasks[:HELDOUT], tasks[HELDOUT:]
    _warm_up(model, Rows(tokenizer, train[PROBE:]), Rows(tokenizer, train[:PROBE]), target, most_steps)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, part in (("heldout", heldout), ("train", train)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in part))
    (folder / "reward.py").write_text(REWARD)
    return Rows(tokenizer, heldout)


def _warm_up(model: Any, train: Rows, probe: Rows, target: float, most_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20)
        loss = train.loss(model, torch.randint(len(train), (64,)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            reached = probe.accuracy(model)
            if step % 50 == 0 or reached >= target:
                say(f"warm-up, step {step}: loss {loss.item():.3f}, exact match {reached:.2f}")
            if reached >= target:
                return


def accuracy_of(model_dir: Path, heldout: Rows) -> float:
    """The held-out accuracy of an exported model."""
    return heldout.accuracy(AutoModelForCausalLM.from_pretrained(model_dir))
