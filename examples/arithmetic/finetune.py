"""Supervised training, or preferences, on the arithmetic demo's material: one program over roles, in this process.

    python examples/arithmetic/prepare.py --out runs/arithmetic/task-0
    python examples/arithmetic/finetune.py sft runs/arithmetic/task-0
    python examples/arithmetic/finetune.py dpo runs/arithmetic/task-0

Prints how many held-out sums the model gets right before and after. ``sft`` learns from right answers; ``dpo`` is told that they
are better than answers with one wrong digit. `RayRanks` in the place of `LocalRanks` runs the same on a cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from weightlane.trainer import (
    IGNORED,
    LocalRanks,
    Role,
    RoleSpec,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    WorkerDispatch,
    dpo,
    dpo_step,
    sft,
    take_step,
)
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY, REFERENCE


class Sums:
    """Tasks of one file as sequences."""

    def __init__(self, folder: Path, name: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.tasks = [json.loads(line) for line in (folder / name).read_text().splitlines()]

    def sequence(self, task: dict[str, str], answer: str) -> TokenSequence:
        """The prompt of `task`, answered by `answer`."""
        prompt, completion = self._tokenizer(task["prompt"]).input_ids, self._tokenizer(answer).input_ids
        return TokenSequence.of_completion(prompt, [*completion, self._tokenizer.eos_token_id])

    def right(self, tasks: Sequence[dict[str, str]]) -> list[TokenSequence]:
        """`tasks` with their answers."""
        return [self.sequence(task, task["answer"]) for task in tasks]

    def pairs(self, tasks: Sequence[dict[str, str]], rng: random.Random) -> list[TokenSequence]:
        """Each of `tasks` with its answer, then with one digit of that changed."""
        found = []
        for task in tasks:
            answer, place = task["answer"], rng.randrange(len(task["answer"]))
            digit = str((int(answer[place]) + rng.randint(1, 9)) % 10)
            wrong = answer[:place] + digit + answer[place + 1 :]
            found += [self.sequence(task, answer), self.sequence(task, wrong)]
        return found


async def accuracy(policy: Role, sequences: Sequence[TokenSequence]) -> float:
    """The share of answers that greedy decoding would give: every token of theirs is the most probable one after those before."""
    outputs = await policy.forward(TokenBatch(tuple(sequences)), (), top_k=1)
    counted = [sequence.targets != IGNORED for sequence in sequences]
    right = [
        bool((found["top_tokens"][mask, 0] == sequence.targets[mask]).all())
        for found, sequence, mask in zip(outputs, sequences, counted, strict=True)
    ]
    return sum(right) / len(right)


async def train(how: str, folder: Path, steps: int) -> tuple[float, float]:
    """Train the model in `folder`; its accuracy on held-out tasks before and after."""
    rng, tasks, heldout = random.Random(0), Sums(folder, "train.jsonl"), Sums(folder, "heldout.jsonl")
    config = TrainerConfig(learning_rate=1e-3 if how == "sft" else 3e-4, lr_warmup_steps=10)
    loss = sft if how == "sft" else dpo(beta=0.3)
    roles = [RoleSpec(POLICY, config, folder / "model", {OBJECTIVE: loss})]
    if how == "dpo":
        roles.append(RoleSpec(REFERENCE, TrainerConfig(frozen=True), folder / "model"))
    dispatch = WorkerDispatch(roles, {"trainer": LocalRanks()})
    try:
        await dispatch.start()
        policy = dispatch[POLICY]
        before = await accuracy(policy, heldout.right(heldout.tasks))
        for step in range(steps):
            drawn = rng.sample(tasks.tasks, 64)
            if how == "sft":
                report = await take_step(policy, TokenBatch(tuple(tasks.right(drawn))), OBJECTIVE)
            else:
                report = await dpo_step(dispatch, TokenBatch(tuple(tasks.pairs(drawn, rng)), sequences_per_unit=2))
            if step % 20 == 0 or step == steps - 1:
                print(f"step {report.step}/{steps}  loss {report.metrics['loss']:.3f}")
        return before, await accuracy(policy, heldout.right(heldout.tasks))
    finally:
        await dispatch.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=["sft", "dpo"])
    parser.add_argument("folder", type=Path, help="what prepare.py wrote")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    before, after = asyncio.run(train(options.how, options.folder, options.steps))
    print(f"held-out accuracy {before:.3f} -> {after:.3f}")
