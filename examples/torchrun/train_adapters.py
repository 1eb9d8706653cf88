"""Trains two adapters on one model at once, each on its own data; see docs/guides/your-own-training-program.md.

torchrun --nproc-per-node 2 train_adapters.py --model DIR --data french.jsonl --data german.jsonl --out adapters
"""

import argparse
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from weightlane.trainer import LoraConfig, TrainerConfig
from weightlane.trainer.user_program import AdamParams, ForwardInput, TrainerRank

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="Hugging Face directory")
parser.add_argument("--data", required=True, action="append", type=Path, help="JSON lines of prompt and completion")
parser.add_argument("--out", required=True, type=Path, help="where to save the adapters, as PEFT does")
parser.add_argument("--trainer", type=json.loads, default={}, help="settings of TrainerConfig, as JSON")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(args.model)


def encoded(line: str, slot: str) -> ForwardInput:
    """A pair as a sequence, of which the completion is predicted, computed by the adapter `slot`."""
    prompt, completion = (tokenizer(json.loads(line)[part]).input_ids for part in ("prompt", "completion"))
    targets = [-100] * (len(prompt) - 1) + completion + [tokenizer.eos_token_id]
    return ForwardInput(input_tokens=prompt + completion, target_tokens=targets, checkpoint=slot)


with TrainerRank(args.model, TrainerConfig(**args.trainer)) as rank:
    data = {path.stem: [encoded(line, path.stem) for line in path.read_text().splitlines()] for path in args.data}
    for slot in data:
        rank.load_checkpoint(slot, config=LoraConfig(rank=8, alpha=16))
    rng = random.Random(0)  # the same batches on every rank
    for step in range(1, args.steps + 1):
        batch = [each for pairs in data.values() for each in rng.choices(pairs, k=16)]
        sums = {slot: torch.zeros(2) for slot in data}  # for each adapter its loss, and its tokens
        for micro in rank.forward_micro_batches(batch):
            loss = 0.0
            for given, output in zip(micro.inputs, micro.outputs, strict=True):
                loss = (own := -output.target_logprobs.sum()) + loss
                sums[given.checkpoint] += torch.stack([own.detach().cpu(), (given.target_tokens >= 0).sum()])
            rank.backward(loss)
        for slot, both in sums.items():
            dist.all_reduce(both)
            total, tokens = both.tolist()
            norms = rank.optim_step(AdamParams(learning_rate=1e-3), 1 / tokens, [slot])
            if dist.get_rank() == 0:
                print(f"step {step} {slot}: loss {total / tokens:.3f}, gradient norm {norms[slot]:.3f}", flush=True)
    for slot in data:
        rank.save(slot, args.out / slot)
