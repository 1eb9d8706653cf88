"""A run with ``max_staleness = 0`` is, bit for bit, the synchronous program in this file, of torch and transformers alone.

The program takes the samples that the run recorded, computes the objective by its formula, steps torch's AdamW, and has the
run's weights after every step. What depends on the order of floating-point sums repeats the run's: a sequence in each pass,
those of both ranks added before they are accumulated, and a normaliser that is read off the first logit.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from run_process import FinishedRun
from tiny_models import load_tensors
from tiny_run import BETAS, GROUP_SIZE, LEARNING_RATE, PROMPTS_PER_STEP, Material
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

STEPS, RANKS = 4, 2
CLIP_LOW, CLIP_HIGH, RATIO_CAP = 0.2, 0.28, 2.0
NEAR = 1e-5
"""Most nats between log-probabilities of vLLM and transformers in float32; a step changes them by a thousand times that."""


@dataclass(frozen=True)
class Sample:
    """A completion as the run recorded it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float

    @property
    def length(self) -> int:
        """Tokens that the trainer reads: the last one predicts nothing."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


class TargetLogprobs(torch.autograd.Function):
    """The log-probability of each row's token, with the gradient ``[token] - p`` by logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        log_sum = logits[:, 0] - logits.log_softmax(-1)[:, 0]
        ctx.save_for_backward(logits, tokens, log_sum)
        return logits.gather(1, tokens[:, None])[:, 0] - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, tokens, log_sum = ctx.saved_tensors
        slope = torch.exp(logits - log_sum[:, None]) * -grads[0][:, None]
        return slope.scatter_add(1, tokens[:, None], grads[0][:, None]), None


class SynchronousProgram:
    """Generates nothing: it trains the samples of a step, then has the next version."""

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """By name, tied ones once."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def logprobs(self, sample: Sample) -> torch.Tensor:
        """float32 [completion tokens]."""
        ids = torch.tensor([*sample.prompt_ids, *sample.token_ids])
        hidden = self.model.model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
        logits = self.model.lm_head(hidden[len(sample.prompt_ids) - 1 :])
        found: torch.Tensor = TargetLogprobs.apply(logits, torch.tensor(sample.token_ids))  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def greedy(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens after a prompt."""
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt_ids) :]

    def step(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Take one step of the clipped objective, a mean over tokens, with advantages relative to the group."""
        tokens = sum(len(sample.token_ids) for group in groups for sample in group)
        judged = [pair for group in groups for pair in zip(group, advantages(group), strict=True)]
        shares: list[list[list[torch.Tensor]]] = [[] for _ in range(RANKS)]
        loads = [0] * RANKS
        for sample, advantage in sorted(judged, key=lambda pair: -pair[0].length):
            if advantage:  # others have no gradient
                rank = loads.index(min(loads))
                shares[rank].append(self.gradients(sample, advantage, tokens))
                loads[rank] += sample.length
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for turn in range(max(map(len, shares))):
            of_ranks = [share[turn] for share in shares if turn < len(share)]
            for parameter, *parts in zip(parameters, *of_ranks, strict=True):
                parameter.grad += sum(parts[1:], parts[0])
        self.optimizer.step()

    def gradients(self, sample: Sample, advantage: float, tokens: int) -> list[torch.Tensor]:
        """Those of one sequence, of every parameter."""
        ratio = torch.exp(self.logprobs(sample) - torch.tensor(sample.logprobs))
        capped = ratio.clamp(max=RATIO_CAP) * advantage
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
        loss = -torch.minimum(capped, clipped).sum() / tokens
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


def advantages(group: Sequence[Sample]) -> list[float]:
    rewards = [sample.reward for sample in group]
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Has torch compute as a trainer rank does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_staleness_is_a_synchronous_program_bit_for_bit(
    material: Material, finished_run: FinishedRun
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    noted = defaultdict(list)
    for line in finished_run.config.with_name("noted.jsonl").read_text().splitlines():
        noted[(each := json.loads(line))["prompt"]].append(each)
    heldout = [json.loads(line)["prompt"] for line in material.heldout.read_text().splitlines()]
    evaluated = {prompt: (tokenizer.encode(prompt), noted.pop(prompt)) for prompt in heldout}
    steps = samples_of(finished_run.run_dir, tokenizer, noted)

    program = SynchronousProgram(material.model)
    for step, groups in enumerate(steps, start=1):
        assert [len(group) for group in groups] == [GROUP_SIZE] * PROMPTS_PER_STEP
        for sample in (sample for group in groups for sample in group):
            assert sample.versions == [step - 1] * len(sample.token_ids)
            torch.testing.assert_close(
                program.logprobs(sample).detach(), torch.tensor(sample.logprobs), atol=NEAR, rtol=0
            )
        if step == 1:
            for prompt_ids, (first, _) in evaluated.values():
                assert program.greedy(prompt_ids, len(first["token_ids"])) == first["token_ids"]
        before = {name: weight.clone() for name, weight in program.weights.items()}
        program.step(groups)
        published = load_tensors(finished_run.run_dir / (f"exports/step-{step}" if step < STEPS else "model"))
        weights = program.weights
        assert published.keys() == weights.keys()
        assert not any(torch.equal(weights[name], before[name]) for name in weights), "every tensor was trained"
        different = {name: float((weights[name] - tensor).abs().max()) for name, tensor in published.items()}
        assert all(torch.equal(weights[name], tensor) for name, tensor in published.items()), (step, different)
    for prompt_ids, (_, last) in evaluated.values():
        assert program.greedy(prompt_ids, len(last["token_ids"])) == last["token_ids"]


def samples_of(run_dir: Path, tokenizer: Any, noted: dict[str, list[dict[str, Any]]]) -> list[list[list[Sample]]]:
    """Read the samples of each step, by group, in their order: those of the run's file, with the tokens of `noted`."""
    found: list[dict[str, list[Sample]]] = [defaultdict(list) for _ in range(STEPS)]
    for line in (run_dir / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        prompt, step = sample["prompt"], sample["step"]
        if step > STEPS:  # of another test, which resumes the run
            continue
        tokens = noted[prompt].pop(0)
        assert tokens["completion"] == sample["completion"]
        versions = [version for version, count in sample["versions"] for _ in range(count)]
        found[step - 1][prompt].append(
            Sample(tokenizer.encode(prompt), tokens["token_ids"], tokens["logprobs"], versions, sample["reward"])
        )
    return [list(groups.values()) for groups in found]
