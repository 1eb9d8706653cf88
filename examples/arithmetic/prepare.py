"""Makes the arithmetic demo's material: a tiny Qwen3 that half knows two-digit addition, its tokenizer and its tasks.

    python examples/arithmetic/prepare.py --out runs/arithmetic/task-0 --seed 0

Writes ``OUT/model`` (a Hugging Face directory), ``OUT/train.jsonl`` and ``OUT/heldout.jsonl``. A task is a prompt such as
``12+34=`` with the answer ``640``: the sum as three digits, the last digit first, which is the order in which carries are
worked out. The model is trained on these pairs with plain torch and transformers until it gets about two in five right;
reinforcement learning does the rest. A second call with the same settings does nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from transformers.utils import logging as transformers_logging

HELDOUT = 500
PROBE = 250
ANSWER_DIGITS = 3
EOS, PAD = "<|endoftext|>", "<|pad|>"
STAMP = "prepared.json"


def make_tasks(seed: int) -> list[dict[str, str]]:
    """All 10,000 additions of two two-digit numbers, in an order that depends on `seed` only."""
    tasks = [
        {"prompt": f"{left:02d}+{right:02d}=", "answer": f"{left + right:0{ANSWER_DIGITS}d}"[::-1]}
        for left in range(100)
        for right in range(100)
    ]
    random.Random(seed).shuffle(tasks)
    return tasks


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus end-of-text and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, EOS, PAD])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=64)


def make_model(tokenizer: PreTrainedTokenizerFast, longest: int = 64) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.6 million parameters in float32; head size 32 is the smallest that vLLM's CPU attention takes."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=longest,
        initializer_range=0.05,  # with 0.02 so small a model needs twice the steps
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, tasks: Sequence[dict[str, str]]) -> tuple[torch.Tensor, int]:
    """int64 [tasks, length] of prompt, answer and end-of-text, and the length of a prompt: all lines are equally long."""
    prompt_length = len(tokenizer.encode(tasks[0]["prompt"]))
    rows = [[*tokenizer.encode(task["prompt"] + task["answer"]), tokenizer.eos_token_id] for task in tasks]
    return torch.tensor(rows), prompt_length


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, rows: torch.Tensor, prompt_length: int) -> float:
    """Share of `rows` whose whole completion greedy decoding reproduces."""
    ids = rows[:, :prompt_length]
    for _ in range(rows.shape[1] - prompt_length):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return (ids == rows).all(dim=1).float().mean().item()


def warm_up(model: Qwen3ForCausalLM, rows: torch.Tensor, prompt_length: int, steps: int, target: float) -> None:
    """Supervised training on `rows` until greedy accuracy on its last `PROBE` lines, left out of it, reaches `target`."""
    train, probe = rows[:-PROBE], rows[-PROBE:]
    peak = 2e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, step / 20)
        batch = train[torch.randint(len(train), (128,))]
        logits = model(batch[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, prompt_length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0 or step == steps:
            reached = accuracy(model, probe, prompt_length)
            if step % 50 == 0 or reached >= target:
                seconds = time.perf_counter() - began
                print(f"  step {step}: loss {loss.item():.3f}, exact match {reached:.2f}, {seconds:.0f} s", flush=True)
            if reached >= target:
                return


def prepare(out: Path, settings: dict[str, Any]) -> None:
    """Make everything under a temporary name, then put it in place."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    set_seed(settings["seed"])
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tasks = make_tasks(settings["seed"])
    heldout, train = tasks[:HELDOUT], tasks[HELDOUT:]
    for name, split in (("heldout", heldout), ("train", train)):
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in split))
    print(f"tasks: {len(train)} for training, {len(heldout)} held out, none in both")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"model: Qwen3, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters; supervised warm-up:")
    rows, prompt_length = encode(tokenizer, train)
    warm_up(model, rows, prompt_length, settings["steps"], settings["target"])
    model.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    (partial / STAMP).write_text(json.dumps(settings))
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    print(f"prepared {out} in {time.perf_counter() - began:.0f} s")


def main() -> None:
    """Read the command line and prepare, unless that was done before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the initial weights and the warm-up")
    parser.add_argument("--steps", type=int, default=300, help="most warm-up steps (batches of 128)")
    parser.add_argument("--target", type=float, default=0.4, help="exact match at which the warm-up ends early")
    arguments = parser.parse_args()
    settings = {"seed": arguments.seed, "steps": arguments.steps, "target": arguments.target, "format": 1}
    stamp = arguments.out / STAMP
    if stamp.is_file() and json.loads(stamp.read_text()) == settings:
        print(f"{arguments.out} is already prepared with these settings")
        return
    if arguments.out.exists() and not stamp.is_file() and any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} exists and was not made by this program")
    prepare(arguments.out, settings)


if __name__ == "__main__":
    main()
