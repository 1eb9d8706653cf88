"""Makes the calculator example's material: a tiny Qwen3 that calls its tool correctly about two times in five, and its tasks.

    python examples/calculator/prepare.py --out runs/calculator/task --seed 0

Writes ``OUT/model`` (a Hugging Face directory), ``OUT/train.jsonl`` and ``OUT/heldout.jsonl``. A task is a product such as
``Multiply 123 and 456 by the tool.``, which the model cannot compute. It can call ``multiply``, in the format of Hermes and
Qwen, and then has to say what it read. The model is trained on whole conversations with plain torch until greedy decoding gets
`TARGET` of them right.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, set_seed
from transformers.utils import logging as transformers_logging

LONGEST = 96
"""Tokens of the longest episode."""
ARITHMETIC = runpy.run_path(str(Path(__file__).parents[1] / "arithmetic" / "prepare.py"))
USER, TOOL, ASSISTANT, END = "<|user|>", "<|tool|>", "<|assistant|>", "<|endoftext|>"
PIECES = ["<tool_call>", '{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", "</tool_call>"]
"""Single tokens, so that a call is short."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRAIN, HELDOUT, PROBE = 4000, 256, 256
TARGET = 0.4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one for each of `PIECES` and of the roles."""
    tokenizer: PreTrainedTokenizerFast = ARITHMETIC["make_tokenizer"]()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in (USER, TOOL, ASSISTANT)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PIECES])
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = LONGEST
    return tokenizer


def question(left: int, right: int) -> str:
    """Return the prompt of a task."""
    return f"Multiply {left} and {right} by the tool."


def conversation(tokenizer: PreTrainedTokenizerFast, left: int, right: int) -> tuple[list[int], list[bool]]:
    """Tokens of a solved task, and which of them the model writes."""
    product = str(left * right)
    call = f"{PIECES[0]}{PIECES[1]}{left}{PIECES[2]}{right}{PIECES[3]}{PIECES[4]}"
    parts = [
        (f"{USER}{question(left, right)}{END}{ASSISTANT}", False),
        (f"{call}{END}", True),
        (f"{TOOL}{product}{END}{ASSISTANT}", False),
        (f"{product}{END}", True),
    ]
    encoded = [(tokenizer.encode(text, add_special_tokens=False), own) for text, own in parts]
    return [token for ids, _ in encoded for token in ids], [own for ids, own in encoded for _ in ids]


def batch_of(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [pairs, length] tokens, and as many targets: -100 where the model does not write."""
    rows = [conversation(tokenizer, *pair) for pair in pairs]
    width = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), -100)
    for row, (ids, own) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        targets[row, : len(ids)] = torch.tensor([token if mine else -100 for token, mine in zip(ids, own, strict=True)])
    return tokens, targets


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of conversations of which greedy decoding gets every token right."""
    found = model(tokens[:, :-1], use_cache=False).logits.argmax(-1)
    wanted = targets[:, 1:]
    return ((found == wanted) | (wanted == -100)).all(dim=1).float().mean().item()


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> None:
    """Train on solved tasks until `accuracy` on `PROBE` others reaches `TARGET`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    probe = batch_of(tokenizer, pairs[:PROBE])
    began = time.perf_counter()
    for step in range(1, 2001):
        tokens, targets = batch_of(tokenizer, random.sample(pairs[PROBE:], 64))
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 0:
            reached = accuracy(model, *probe)
            if step % 50 == 0 or reached >= TARGET:
                seconds = time.perf_counter() - began
                print(f"  step {step}: loss {loss.item():.3f}, right {reached:.2f}, {seconds:.0f} s", flush=True)
            if reached >= TARGET:
                return


def make(folder: Path, seed: int) -> None:
    """Make everything in `folder`."""
    tokenizer = make_tokenizer()
    model = ARITHMETIC["make_model"](tokenizer, LONGEST)
    drawn = random.Random(seed)
    pairs = [(drawn.randrange(100, 1000), drawn.randrange(100, 1000)) for _ in range(TRAIN + HELDOUT)]
    pairs = list(dict.fromkeys(pairs))
    warm_up(model, tokenizer, pairs[HELDOUT:])
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, part in (("heldout", pairs[:HELDOUT]), ("train", pairs[HELDOUT:])):
        lines = [json.dumps({"prompt": question(left, right), "answer": str(left * right)}) for left, right in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main(about: str, make: Callable[[Path, int], None]) -> None:
    """Read the command line, and have `make` make everything under a temporary name, then put it in place, unless it is there."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out: Path = options.out
    if (out / "model").is_dir():
        print(f"{out} is there already.")
        return
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    set_seed(options.seed)
    making = out.with_name(f"{out.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    make(making, options.seed)
    shutil.rmtree(out, ignore_errors=True)
    making.rename(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(__doc__ or "", make)
