"""Batches of completions with rewards, and the trainer that learns from them."""

from __future__ import annotations

import random

from engine_batches import VOCAB

from weightlane.trainer import TokenBatch, TokenSequence, TrainerConfig
from weightlane.trainer.objectives.policy_values import ADVANTAGES, REWARD, ROLLOUT_LOGPROBS

TRAINER = TrainerConfig(device="cpu", learning_rate=3e-3, max_grad_norm=10.0)


def judged_batch(seed: int, rows: int = 8) -> TokenBatch:
    """Completions whose reward is the share of small tokens in them; the first target of each doesn't count."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(rows):
        completion = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))]
        sequences.append(
            TokenSequence.of_completion(
                [rng.randrange(VOCAB) for _ in range(3)],
                completion,
                masked=1,
                per_token={ROLLOUT_LOGPROBS: [-rng.uniform(3.5, 4.5) for _ in completion], ADVANTAGES: rng.gauss(0, 1)},
                per_sequence={REWARD: sum(token < VOCAB // 2 for token in completion) / len(completion)},
            )
        )
    return TokenBatch(tuple(sequences))
