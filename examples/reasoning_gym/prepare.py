"""Makes the reasoning-gym example's material: a tiny Qwen3 that spells a quarter of words backward, and the tasks.

    python examples/reasoning_gym/prepare.py --out runs/reasoning_gym/task --seed 0

Writes ``OUT/model`` (a Hugging Face directory), ``OUT/train.jsonl`` and ``OUT/heldout.jsonl``. The tasks are those of the dataset
``spell_backward`` with words of five letters; a prompt is the word alone, since a token is a byte. The model is that of the
arithmetic example, trained on them with plain torch until greedy decoding gets `TARGET` of the words right; reinforcement
learning does the rest.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
from pathlib import Path

import torch
from transformers import set_seed
from transformers.utils import logging as transformers_logging
from weightlane_environments.tasks import problem_tasks, write_tasks

ARITHMETIC = runpy.run_path(str(Path(__file__).parents[1] / "arithmetic" / "prepare.py"))
TRAIN, HELDOUT = 4000, 400
LETTERS = 5
TARGET = 0.25


def prepare(out: Path, seed: int) -> None:
    """Make everything under a temporary name, then put it in place."""
    if (out / "model").is_dir():
        print(f"{out} is there already.")
        return
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    set_seed(seed)
    making = out.with_name(f"{out.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    options = {"min_word_len": LETTERS, "max_word_len": LETTERS}
    tasks = problem_tasks("spell_backward", options, seed=seed, size=HELDOUT + TRAIN, template="{question}")
    for task in tasks:
        task["prompt"] = task["prompt"].rpartition(" ")[2] + ">"  # the question ends with the word
    train, heldout = write_tasks(tasks, heldout=HELDOUT, out=making)
    print(f"tasks: {train} for training, {heldout} held out, none in both")
    lines = (making / "train.jsonl").read_text().splitlines()
    tokenizer = ARITHMETIC["make_tokenizer"]()
    model = ARITHMETIC["make_model"](tokenizer)
    rows, prompt_length = ARITHMETIC["encode"](tokenizer, [json.loads(line) for line in lines])
    ARITHMETIC["warm_up"](model, rows, prompt_length, 2000, TARGET)
    model.save_pretrained(making / "model")
    tokenizer.save_pretrained(making / "model")
    shutil.rmtree(out, ignore_errors=True)
    making.rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prepare(options.out, options.seed)
