"""Two-digit addition over the Tinker API: supervised training first, then reinforcement learning, with the public SDK alone.

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any
    python examples/tinker/arithmetic.py --data runs/arithmetic/task-0

Needs ``pip install tinker``, and a service: see ``service.toml``. Prints the held-out accuracy before and after each part.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

import tinker
from tinker import types

Task = dict[str, str]
WARM_UP = 10
"""Optimizer steps over which the learning rate rises."""
SAMPLES = 8
"""Completions of a task."""


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory with train.jsonl and heldout.jsonl")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--supervised", type=int, default=0, metavar="STEPS")
    parser.add_argument("--reinforce", type=int, default=100, metavar="STEPS")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--loss", default="importance_sampling", help="importance_sampling, ppo, cispo, ...")
    parser.add_argument("--resume", default="", metavar="PATH", help="tinker:// path of saved weights to go on from")
    args = parser.parse_args()
    train, heldout = (read(args.data / f"{name}.jsonl") for name in ("train", "heldout"))
    random.Random(args.seed).shuffle(train)

    service = tinker.ServiceClient()
    (model,) = tinker.RestClient().get_server_capabilities().result().supported_models
    if args.resume:
        training = service.create_training_client_from_state_with_optimizer(args.resume).result()
    else:
        training = service.create_lora_training_client(model.model_name, args.rank, args.seed).result()
    tokenizer = training.get_tokenizer()

    print(f"accuracy before: {accuracy(training, tokenizer, heldout):.3f}", flush=True)
    for step in range(args.supervised):
        batch = [train[(step * 32 + index) % len(train)] for index in range(32)]
        training.forward_backward([supervised(tokenizer, task, len(batch)) for task in batch], "cross_entropy")
        training.optim_step(adam(args.learning_rate, step)).result()
    if args.supervised:
        print(
            f"accuracy after {args.supervised} supervised steps: {accuracy(training, tokenizer, heldout):.3f}",
            flush=True,
        )
    for step in range(args.reinforce):
        batch = [train[(step * 32 + index) % len(train)] for index in range(32)]
        data, reward = rollouts(training, tokenizer, batch, seed=1000 * args.seed + step)
        if data:
            training.forward_backward(data, args.loss)
            training.optim_step(adam(args.learning_rate, step)).result()
        if step % 10 == 0:
            print(f"step {step}: reward {reward:.3f}", flush=True)
    if args.reinforce:
        print(f"accuracy after {args.reinforce} steps of RL: {accuracy(training, tokenizer, heldout):.3f}", flush=True)
    print("saved:", training.save_state("final", overwrite=True).result().path)


def adam(learning_rate: float, step: int) -> types.AdamParams:
    """The optimizer of the step that follows `step` steps: that of ``examples/arithmetic/arithmetic.toml``."""
    rate = learning_rate * (step + 1) / WARM_UP if step < WARM_UP else learning_rate
    return types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.98, eps=1e-8, grad_clip_norm=1.0)


def read(path: Path) -> list[Task]:
    """The tasks in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def supervised(tokenizer: Any, task: Task, batch_size: int) -> types.Datum:
    """A task whose answer is to be learnt. Losses are sums, which its weights make means over a batch."""
    prompt = tokenizer.encode(task["prompt"])
    answer = [*tokenizer.encode(task["answer"]), tokenizer.eos_token_id]
    weights = [0.0] * (len(prompt) - 1) + [1 / len(answer) / batch_size] * len(answer)
    return datum(prompt, answer, weights=weights)


def datum(prompt: list[int], completion: list[int], **inputs: list[float]) -> types.Datum:
    """A prompt and its completion, every token of which is predicted from those before."""
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def rollouts(training: Any, tokenizer: Any, batch: list[Task], seed: int) -> tuple[list[types.Datum], float]:
    """Completions of each task by the weights as they are now, where some are right; and their mean reward.

    Losses are sums, and ``weightlane train`` takes the mean over tokens. Advantages are therefore divided by the number of tokens
    of all completions, of those without an advantage too.
    """
    sampler = training.save_weights_and_get_sampling_client(kind="inflight").result()
    asked = [(task, tokenizer.encode(task["prompt"])) for task in batch]
    answers = []
    for number, (_, prompt) in enumerate(asked):
        # The samples of a request may have the seeds after its own. Equal seeds would explore alike.
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=SAMPLES * (len(batch) * seed + number))
        answers.append(sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params))
    data, total = [], 0.0
    sampled = [answer.result().sequences for answer in answers]
    tokens = sum(len(each.tokens) for sequences in sampled for each in sequences)
    for (task, prompt), sequences in zip(asked, sampled, strict=True):
        rewards = [float(text_of(tokenizer, each.tokens) == task["answer"]) for each in sequences]
        mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)
        total += mean
        if spread:
            pad = [0.0] * (len(prompt) - 1)
            for each, reward in zip(sequences, rewards, strict=True):
                advantages = pad + [(reward - mean) / (spread + 1e-6) / tokens] * len(each.tokens)
                data.append(datum(prompt, each.tokens, logprobs=pad + each.logprobs, advantages=advantages))
    return data, total / len(batch)


def accuracy(training: Any, tokenizer: Any, tasks: list[Task]) -> float:
    """Share of the tasks that greedy completions solve."""
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    answers = [
        sampler.sample(types.ModelInput.from_ints(tokenizer.encode(each["prompt"])), 1, params) for each in tasks
    ]
    right = [
        text_of(tokenizer, answer.result().sequences[0].tokens) == task["answer"]
        for answer, task in zip(answers, tasks, strict=True)
    ]
    return sum(right) / len(right)


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    """A completion as text."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


if __name__ == "__main__":
    main()
