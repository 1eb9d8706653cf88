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
from weightlane.trainer.torchrun import AdamParams, ForwardInput, TrainerRank

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="Hugging Face directory")
parser.add_argument("--data", required=True, action="append", type=Path, help='lines of {"prompt": ..., "completion": ...}')
parser.add_argument("--out", required=True, type=Path, help="where to save the adapters, as PEFT does")
parser.add_argument("--trainer", type=json.loads, default={}, help="settings of weightlane.trainer.TrainerConfig, as JSON")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=16, help="pairs of each file in a step")
args = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(args.model)


def encoded(line: str, slot: str) -> ForwardInput:
    pair = json.loads(line)
    prompt, completion = tokenizer(pair["prompt"]).input_ids, tokenizer(pair["completion"]).input_ids
    tokens, targets = prompt + completion, [-100] * (len(prompt) - 1) + completion + [tokenizer.eos_token_id]
    return ForwardInput(input_tokens=tokens, target_tokens=targets, checkpoint=slot)


with TrainerRank(args.model, TrainerConfig(**args.trainer)) as rank:
    data = {path.stem: [encoded(line, path.stem) for line in path.read_text().splitlines()] for path in args.data}
    for slot in data:
        rank.load_checkpoint(slot, config=LoraConfig(rank=8, alpha=16))
    rng = random.Random(0)  # the same batches on every rank
    for step in range(1, args.steps + 1):
        batch = [each for pairs in data.values() for each in rng.sample(pairs, min(args.batch, len(pairs)))]
        sums = torch.zeros(len(data), 2)  # for each adapter its loss, and its tokens
        for micro in rank.forward_micro_batches(batch):
            loss = torch.zeros(())
            for given, output in zip(micro.inputs, micro.outputs, strict=True):
                own = -output.target_logprobs.sum()
                loss = loss + own.cpu()
                sums[list(data).index(given.checkpoint)] += torch.tensor([own.detach().cpu(), sum(given.target_tokens >= 0)])
            rank.backward(loss)
        dist.all_reduce(sums)
        for (slot, _), (loss_sum, tokens) in zip(data.items(), sums.tolist(), strict=True):
            norm = rank.optim_step(AdamParams(learning_rate=1e-3), scale_grads=1 / tokens, checkpoints=[slot])[slot]
            if dist.get_rank() == 0:
                print(f"step {step} {slot}: loss {loss_sum / tokens:.3f}, gradient norm {norm:.3f}", flush=True)
    for slot in data:
        rank.save(slot, args.out / slot)
