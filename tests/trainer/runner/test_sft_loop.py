"""`SftLoop` trains as torch and transformers would, once an epoch on every example, and goes on where it was saved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import VOCAB
from local_dispatch import in_dispatch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from weightlane.ckpt_engines import TooManyFailuresError
from weightlane.plugins import hookimpl, make_hooks
from weightlane.trainer import IGNORED, TokenSequence, TrainerConfig
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.data.sft_examples import Example
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.loop.protocols import LoopState
from weightlane.trainer.runner.jobs import Export, Save
from weightlane.trainer.runner.runner import Runner
from weightlane.trainer.runner.sft_config import SftConfig
from weightlane.trainer.runner.sft_loop import SftLoop, SftSummary

LEARNING_RATE = 1e-2


def make_examples(seed: int, count: int) -> list[Example]:
    rng = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(2, most))]

    return [Example(TokenSequence.of_completion(ids(5), ids(7)), f"line {number}") for number in range(count)]


class Trial:
    """Runs the loop over one rank in this process, and keeps what it was told."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self.folder = model, folder
        self.states: list[LoopState] = []
        self.events: list[tuple[str, int, Mapping[str, Any]]] = []
        self.exported: list[tuple[int, bool]] = []

    @hookimpl
    def training_step(self, step: int, facts: Mapping[str, Any]) -> None:
        self.events.append(("step", step, facts))

    @hookimpl
    def evaluated(self, step: int, facts: Mapping[str, Any]) -> None:
        self.events.append(("evaluated", step, facts))

    @hookimpl
    def item_failed(self, kind: str, facts: Mapping[str, Any]) -> None:
        self.events.append((f"failed {kind}", facts["step"], facts))

    def steps(self) -> list[int]:
        return [step for kind, step, _ in self.events if kind == "step"]

    def run(
        self,
        config: SftConfig,
        train: Sequence[Example],
        heldout: Sequence[Example] = (),
        resume: LoopState | None = None,
        **trainer: Any,
    ) -> SftSummary:
        made = TrainerConfig(device="cpu", **{"learning_rate": LEARNING_RATE, "max_grad_norm": 1e9, **trainer})
        state = self.folder / f"state-{resume.step}" if resume else None

        async def live(dispatch: WorkerDispatch) -> SftSummary:
            runner = Runner(dispatch)

            async def save(state: LoopState) -> None:
                self.states.append(state)
                shutil.rmtree(self.folder / f"state-{state.step}", ignore_errors=True)
                await runner.run(Save(self.folder / f"state-{state.step}"))

            async def export(step: int, *, last: bool) -> None:
                self.exported.append((step, last))
                shutil.rmtree(self.folder / f"model-{step}", ignore_errors=True)
                await runner.run(Export(self.folder / f"model-{step}", "float32"))

            parts = {"hooks": make_hooks([self]), "save": save, "export": export}
            return await SftLoop(runner, config, train, heldout, seed=3, resume=resume, **parts).run()

        summary: SftSummary = in_dispatch([RoleSpec(POLICY, made, self._model, state=state)], live)
        return summary

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"model-{step}" / "model.safetensors")


@pytest.fixture
def trial(models: dict[str, Path], tmp_path: Path) -> Trial:
    return Trial(models["qwen3-untied"], tmp_path)


def likelihood(model: Any, examples: Sequence[Example]) -> tuple[torch.Tensor, int]:
    """The sum of the targets' log-probabilities, each sequence by itself, and their number."""
    total, count = torch.zeros(()), 0
    for example in examples:
        logits = model(example.sequence.tokens[None]).logits[0].float()
        total = total - torch.nn.functional.cross_entropy(
            logits, example.sequence.targets, ignore_index=IGNORED, reduction="sum"
        )
        count += example.sequence.target_tokens
    return total, count


def test_its_steps_and_evaluations_are_those_of_torch_and_transformers(trial: Trial, models: dict[str, Path]) -> None:
    train, heldout = make_examples(0, 6), make_examples(1, 5)
    summary = trial.run(SftConfig(epochs=3, batch_size=6, evaluate_every=2), train, heldout)
    model = AutoModelForCausalLM.from_pretrained(models["qwen3-untied"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, heldout_logprobs = [], []
    for step in range(4):
        with torch.no_grad():
            total, count = likelihood(model, heldout)
        heldout_logprobs.append(float(total) / count)
        if step < 3:
            total, count = likelihood(model, train)
            losses.append(float(-total.detach()) / count)
            optimizer.zero_grad()
            (-total / count).backward()
            optimizer.step()
    found = [facts["loss"] for kind, _, facts in trial.events if kind == "step"]
    assert found == pytest.approx(losses, rel=1e-4)
    measured = [(step, facts["mean_logprob"]) for kind, step, facts in trial.events if kind == "evaluated"]
    assert [step for step, _ in measured] == [0, 2, 3]
    assert [value for _, value in measured] == pytest.approx([heldout_logprobs[at] for at in (0, 2, 3)], rel=1e-4)
    assert (summary.heldout_logprob_before, summary.heldout_logprob_after) == (measured[0][1], measured[-1][1])
    targets = sum(example.sequence.target_tokens for example in train)
    assert (summary.steps, summary.epochs, summary.trained_tokens) == (3, 3.0, 3 * targets)
    wanted = dict(model.named_parameters())
    for name, tensor in trial.weights(3).items():
        torch.testing.assert_close(tensor, wanted[name].detach(), rtol=0, atol=2e-4)
    assert trial.exported == [(3, True)]


def test_a_resumed_run_ends_bit_for_bit_as_one_that_was_not_interrupted(trial: Trial) -> None:
    train = make_examples(0, 7)
    config = SftConfig(epochs=2, batch_size=4, save_every=2, export_every=3)
    trial.run(config, train)
    assert trial.steps() == [1, 2, 3, 4], "14 examples: three whole batches and one of two"
    assert [state.step for state in trial.states] == [2, 4]
    assert trial.exported == [(3, False), (4, True)]
    whole = trial.weights(4)
    again = LoopState.from_plain(trial.states[0].to_plain())
    trial.events.clear()
    summary = trial.run(config, train, resume=again)
    assert trial.steps() == [3, 4]
    assert (summary.steps, summary.epochs) == (4, 2.0)
    resumed = trial.weights(4)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any(not torch.equal(trial.weights(3)[name], whole[name]) for name in whole)
    trial.run(config, train, resume=trial.states[-1])
    assert [state.step for state in trial.states] == [2, 4, 4], "a state is not replaced by the same one"
    assert trial.exported[-1] == (4, True)


def test_every_example_has_its_turn_once_an_epoch_in_another_order(trial: Trial) -> None:
    """At no learning rate the loss of a step says which example it was."""
    trial.run(SftConfig(epochs=2, batch_size=1), make_examples(0, 5), learning_rate=1e-30)
    assert trial.steps() == list(range(1, 11))
    turns = [round(facts["loss"], 4) for kind, _, facts in trial.events if kind == "step"]
    assert turns[:5] != turns[5:], "in another order"
    assert sorted(turns[:5]) == sorted(turns[5:]), "and the same examples"
    assert len(set(turns)) == 5


def test_a_step_without_a_finite_gradient_costs_its_examples_only_and_too_many_end_the_run(trial: Trial) -> None:
    with pytest.raises(TooManyFailuresError, match=r"3 of the last 20 optimizer steps failed.*sft\.max_failed_share"):
        trial.run(SftConfig(steps=30, batch_size=2), make_examples(0, 4), learning_rate=1e30)
    assert trial.steps() == [1], "after which weights are out of all bounds"
    failed = [facts for kind, _, facts in trial.events if kind == "failed step"]
    assert [facts["step"] for facts in failed] == [2, 2, 2]
    assert all(place.startswith("line ") for facts in failed for place in facts["tasks"])
