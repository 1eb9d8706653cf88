"""Prints what reasoning-gym itself scores: ``python reasoning_gym_scores.py SEED SIZE``, with hashes of a seed.

A line of JSON: for some answers to a problem of each dataset its name, index, question, answer, the answer given, and its score,
which is null where the dataset raises an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

NEEDS_OPTIONS = {"composite"}
"""Datasets that cannot be made without options."""
INDEX = 1


def scores(seed: int, size: int) -> list[list[Any]]:
    found = []
    for name in sorted(set(DATASETS) - NEEDS_OPTIONS):
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=size)
        # A few datasets draw from the generators that the process shares.
        random.seed(json.dumps({"dataset": name, "index": INDEX, "options": {"seed": seed, "size": size}}))
        np.random.seed(INDEX)
        entry = dataset[INDEX]
        answer = "" if entry["answer"] is None else str(entry["answer"])
        for given in (answer, f"{answer} 1", "17", None):
            try:
                score = dataset.score_answer(None if given is None else given.strip(), entry)
            except Exception:  # noqa: BLE001 - for an answer that is none of this dataset
                score = None
            found.append([name, INDEX, entry["question"], answer, given, score])
    return found


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # some datasets print
    with os.fdopen(said, "w") as out:
        json.dump(scores(int(sys.argv[1]), int(sys.argv[2])), out)
