"""Makes the Hangman example's material: words, the environment's tasks, and a tiny Qwen3 that guesses letters at random.

    python plugins/packages/weightlane-verifiers/example/prepare.py --out runs/hangman/task --seed 0

Writes ``OUT/nltk`` (the words, where NLTK finds them), ``OUT/train.jsonl`` and ``OUT/heldout.jsonl`` (by ``python -m
weightlane_verifiers tasks``), and ``OUT/model`` (a Hugging Face directory). The model is trained with plain torch on games whose
player guesses any letter that was not guessed before, so that it knows the rules, and not that all words are spelled with the
same nine letters. ``OUT/nltk`` is read-only: ``chmod u+w`` it before you remove it.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

LONGEST = 320
"""Tokens of the longest game."""
TRAIN, HELDOUT = 400, 64
STEPS = 200
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"
CALCULATOR = runpy.run_path(str(Path(__file__).parents[4] / "examples" / "calculator" / "prepare.py"))


def write_words(folder: Path) -> None:
    """Write the words where NLTK finds them. It would put its own list over them in a folder that it may write to."""
    corpus = folder / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        shutil.copy(Path(__file__).with_name("words.txt"), corpus / name)
    folder.chmod(0o555)


def game(task: dict[str, Any], seed: int) -> list[tuple[str, bool]]:
    """Play a task with letters drawn at random. Returns the conversation in parts, and which of them the player writes."""
    import textarena  # noqa: PLC0415 - it reads the words

    random.seed(task["info"]["seed"])
    played = textarena.make(env_id=task["info"]["game"])
    played.reset(num_players=1)
    parts = [(f"{SYSTEM}{task['system_prompt']}{END}{USER}{task['prompt']}{END}{ASSISTANT}", False)]
    for letter in random.Random(seed).sample(string.ascii_uppercase, 26):
        parts.append((f"[{letter}]{END}", True))
        played.step(f"[{letter}]")
        if played.state.done:
            break
        _, seen = played.get_observation()
        board = str(seen).split("[GAME]")[-1].strip()  # as verifiers shortens what the game says
        parts.append((f"{USER}{board}{END}{ASSISTANT}", False))
    return parts


def make_tokenizer(tasks: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each role, letter in brackets, cell of the board, and line that the game begins with."""
    tokenizer: PreTrainedTokenizerFast = CALCULATOR["ARITHMETIC"]["make_tokenizer"]()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (SYSTEM, USER, ASSISTANT)])
    said = {line for task in tasks for text in (task["system_prompt"], task["prompt"]) for line in text.splitlines()}
    lines = sorted(line for line in said if len(line) > 8 and not line.startswith("  "))
    cells = [f"  {letter}" for letter in f"_{string.ascii_uppercase}"]
    letters = [f"[{letter}]" for letter in string.ascii_uppercase]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*lines, *cells, *letters)])
    tokenizer.chat_template = CALCULATOR["TEMPLATE"]
    tokenizer.model_max_length = LONGEST
    return tokenizer


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[dict[str, Any]]) -> None:
    """Train on a game with random letters of each task."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    games = []
    for number, task in enumerate(tasks):
        parts = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in game(task, number)]
        games.append([(token, token if own else -100) for ids, own in parts for token in ids])
    longest = max(map(len, games))
    rows = torch.tensor([[*each, *[(0, -100)] * (longest - len(each))] for each in games])
    print(f"{len(games)} games of at most {longest} tokens", flush=True)
    for step in range(1, STEPS + 1):
        batch = rows[torch.randint(len(rows), (32,))]
        logits = model(batch[:, :-1, 0], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:, 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)


def make(folder: Path, _seed: int) -> None:
    """Make everything in `folder`."""
    if folder.exists():  # `main` could not remove what is read-only
        (folder / "nltk").chmod(0o755)
        shutil.rmtree(folder)
    write_words(folder / "nltk")
    os.environ["NLTK_DATA"] = str(folder / "nltk")
    from weightlane_verifiers.__main__ import main as verifiers  # noqa: PLC0415 - NLTK looks at NLTK_DATA when it is imported

    numbers = ["--train", str(TRAIN), "--heldout", str(HELDOUT)]
    verifiers(["tasks", str(Path(__file__).with_name("environment.toml")), "--out", str(folder), *numbers])
    tasks = [json.loads(line)["task"] for line in (folder / "train.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer(tasks)
    model = CALCULATOR["ARITHMETIC"]["make_model"](tokenizer, LONGEST)
    warm_up(model, tokenizer, tasks)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    CALCULATOR["main"](__doc__, make)
