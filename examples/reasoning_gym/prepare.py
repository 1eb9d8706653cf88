"""Makes the reasoning-gym example's material: a tiny Qwen3 that spells a quarter of words backward, and the tasks.

    python examples/reasoning_gym/prepare.py --out runs/reasoning_gym/task --seed 0

Writes ``OUT/model`` (a Hugging Face directory), ``OUT/train.jsonl`` and ``OUT/heldout.jsonl``. The tasks are those of the dataset
``spell_backward`` with words of five letters; a prompt is the word alone, since a token is a byte. The model is that of the
arithmetic example, trained on them with plain torch until greedy decoding gets `TARGET` of the words right; reinforcement
learning does the rest.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from weightlane_environments.tasks import problem_tasks, write_tasks

CALCULATOR = runpy.run_path(str(Path(__file__).parents[1] / "calculator" / "prepare.py"))
ARITHMETIC = CALCULATOR["ARITHMETIC"]
TRAIN, HELDOUT = 4000, 400
LETTERS = 5
TARGET = 0.25


def make(folder: Path, seed: int) -> None:
    """Make everything in `folder`."""
    options = {"min_word_len": LETTERS, "max_word_len": LETTERS}
    tasks = problem_tasks("spell_backward", options, seed=seed, size=HELDOUT + TRAIN, template="{question}")
    for task in tasks:
        task["prompt"] = task["prompt"].rpartition(" ")[2] + ">"  # the question ends with the word
    train, heldout = write_tasks(tasks, heldout=HELDOUT, out=folder)
    print(f"tasks: {train} for training, {heldout} held out, none in both")
    lines = (folder / "train.jsonl").read_text().splitlines()
    tokenizer = ARITHMETIC["make_tokenizer"]()
    model = ARITHMETIC["make_model"](tokenizer)
    rows, prompt_length = ARITHMETIC["encode"](tokenizer, [json.loads(line) for line in lines])
    ARITHMETIC["warm_up"](model, rows, prompt_length, 2000, TARGET)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    CALCULATOR["main"](__doc__, make)
