"""Groups without signal are replaced up to a limit, in order; completions that were cut off are treated as configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_world import ALGORITHM, LiveRollout, World, first_is_better, group_of, run
from simulated_time import SimulatedTimeLoop
from test_consumption import GROUPS, LONG_SHARE, is_long, share, simulate

from weightlane.ckpt_engines import TooManyFailuresError
from weightlane.trainer import AlgorithmConfig, LossDenominators, MiniBatch
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import LoopState
from weightlane.trainer.loop.sampling.tally import described_samples

TASKS = [Task(f"{('all wrong', 'mixed', 'all right', 'mixed')[number % 4]} {number}", "") for number in range(48)]
REFILLING = ALGORITHM.model_copy(update={"refill": 30, "compute_zero_advantage": True})


def by_kind(completion: str, task: Mapping[str, Any]) -> float:
    """Reward the first completion of a mixed task alone."""
    if task["prompt"].startswith("mixed"):
        return first_is_better(completion, task)
    return float(task["prompt"].startswith("all right"))


class Recording(World):
    """A world that knows in which order tasks were first asked for."""

    def __post_init__(self) -> None:
        self.asked: list[str] = []
        self.add(RecordingRollout(self, "rollout-0"))


class RecordingRollout(LiveRollout):
    async def generate_group(self, prompt_ids: Sequence[int], **more: Any) -> Sequence[Any]:
        cast("Recording", self.world).asked.append("".join(map(chr, prompt_ids)))
        return await super().generate_group(prompt_ids, **more)


def refilled(refill: int, max_staleness: int = 0, **more: Any) -> tuple[Recording, dict[str, Any]]:
    """Run six steps of two tasks; returns the world and the summary's figures of samples."""
    world = Recording(step=getattr(more.get("resume"), "step", 0))
    algorithm = REFILLING.model_copy(update={"refill": refill})
    settings = {"tasks": TASKS, "heldout": {}, "algorithm": algorithm, "event_loop": SimulatedTimeLoop, **more}
    return world, run(world, by_kind, max_staleness=max_staleness, **settings).samples()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_groups_without_signal_are_replaced_by_further_tasks_and_counted(max_staleness: int) -> None:
    world, samples = refilled(30, max_staleness)
    assert all(prompt.startswith("mixed") for prompt in world.trained)
    assert (len(world.trained), world.step) == (12, 6)
    assert max(world.staleness) <= max_staleness
    assert samples["groups_drawn"] == 12 + samples["groups_refilled"]
    assert samples["groups_without_signal"] == samples["groups_refilled"] > 0
    assert samples["groups_all_right"] + samples["groups_all_wrong"] == samples["groups_refilled"]
    right, wrong = samples["groups_all_right"], samples["groups_all_wrong"]
    assert samples["reward_drawn"] == pytest.approx((3 * right + 12) / (3 * (right + wrong + 12)))
    assert samples["reward_trained"] == pytest.approx(1 / 3)
    if max_staleness == 0:  # nothing is in flight at the end
        kinds = Counter(prompt.rsplit(" ", 1)[0] for prompt in world.asked)
        assert (right, wrong) == (kinds["all right"], kinds["all wrong"])
    for name in ("groups_drawn", "groups_refilled", "groups_all_right", "overlong_completions"):
        assert sum(facts[name] for facts in world.steps) == samples[name], "steps add up to the run"
    bias = samples["reward_trained"] - samples["reward_drawn"]
    said = described_samples(samples)
    assert (
        f"({right} all right, {wrong} all wrong): {right + wrong} replaced by other tasks"
        in said["groups without signal"]
    )
    assert said["reward of completions"].endswith(f"bias {bias:+.3f}")


def test_without_refill_every_group_is_trained_on_and_those_without_signal_are_counted() -> None:
    world, samples = refilled(0)
    assert sorted(world.trained) == sorted(world.asked)
    kinds = Counter(prompt.rsplit(" ", 1)[0] for prompt in world.trained)
    found = [samples[f"groups_{name}"] for name in ("drawn", "all_right", "all_wrong", "refilled")]
    assert found == [12, kinds["all right"], kinds["all wrong"], 0]
    assert samples["reward_drawn"] == samples["reward_trained"]


def test_a_place_is_refilled_up_to_the_limit_and_its_last_group_trained_on_as_it_is() -> None:
    wrong = [task for task in TASKS if task.prompt.startswith("all wrong")]
    world, samples = refilled(2, 1, tasks=wrong)
    assert world.step == 6
    assert [samples[f"groups_{name}"] for name in ("drawn", "without_signal", "all_wrong", "refilled")] == [
        36,
        36,
        36,
        24,
    ]


def test_a_group_that_replaces_another_has_its_place() -> None:
    """The first task drawn has no signal, and two groups are generated at once: the third task replaces it."""

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        return 0.0 if task["prompt"] == world.asked[0] else first_is_better(completion, task)

    world = Recording()
    run(world, judge, tasks=TASKS, heldout={}, algorithm=REFILLING, event_loop=SimulatedTimeLoop, max_staleness=1)
    assert world.trained == [world.asked[at] for at in (2, 1, *range(3, 13))]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_run_refills_and_uses_no_task_twice(max_staleness: int) -> None:
    world, _ = refilled(30, max_staleness, save_every=2)
    for state in world.saved[:-1]:
        again, _ = refilled(30, max_staleness, resume=LoopState.from_plain(state.to_plain()))
        used = world.trained[: 2 * state.step] + again.trained
        assert len(set(used)) == len(used) == 12
        outstanding = [str(task["prompt"]) for task in state.outstanding]
        assert len(outstanding) <= 2 * (max_staleness + 1), "one for each place: those replaced are done"
        assert again.asked[: len(outstanding)] == outstanding, "what was begun and not trained on comes first"
        assert not set(again.asked) & set(world.trained[: 2 * state.step])
        if max_staleness == 0:
            assert sorted(used) == sorted(world.trained)


def test_refilling_trains_long_completions_as_often_as_they_are_drawn() -> None:
    """A group that replaces another keeps its place, so nobody waits for it but those behind it."""
    world, drawn, summary = simulate("wait", refill=30)
    assert len(world.trained) == GROUPS
    assert summary.drawn.groups_refilled > GROUPS / 4, "else nothing is shown"
    assert abs(share(world.trained) - LONG_SHARE) < 0.04
    assert max(world.staleness) <= 1
    assert len(drawn) > GROUPS
    assert any(map(is_long, world.trained))


# -- completions that were cut off --------------------------------------------------------------------------------------------

STOP, MOST = 0, 8


def group(lengths: Sequence[int], rewards: Sequence[float], overlong: Sequence[int] = ()) -> PromptGroup:
    return replace(group_of([[1] * length for length in lengths], rewards), overlong=overlong)


@given(
    completions=st.lists(st.tuples(st.integers(1, MOST), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=5),
    buffer=st.integers(1, MOST),
    factor=st.sampled_from([0.25, 1.0]),
)
def test_the_penalty_for_length_is_dapos(completions: list[tuple[int, float]], buffer: int, factor: float) -> None:
    """Equation 13 with L_max = MOST and L_cache = buffer, and advantages of the rewards with it."""
    expected = []
    for length, reward in completions:
        if length <= MOST - buffer:
            expected.append(reward)
        else:
            expected.append(reward + factor * ((MOST - buffer) - length) / buffer)
    algorithm = AlgorithmConfig(
        overlong="penalty", overlong_buffer=buffer, overlong_penalty=factor, max_new_tokens=MOST, normalize_std=False
    )
    algorithm = algorithm.model_copy(update={"compute_zero_advantage": True})
    batch, _ = to_batch([group(*zip(*completions, strict=True))], algorithm)
    mean = sum(expected) / len(expected)
    for sequence, reward in zip(batch.sequences, expected, strict=True):
        assert sequence.per_sequence["reward"] == pytest.approx(reward, rel=1e-12)
        assert sequence.per_token["advantages"].tolist() == pytest.approx([reward - mean] * sequence.length, abs=1e-6)
    assert group(*zip(*completions, strict=True)).has_signal(algorithm) == (len(set(expected)) > 1)


def test_masked_completions_count_in_the_mean_and_are_no_targets() -> None:
    cut = group([MOST, 3, 2], [1.0, 0.0, 0.5], overlong=[0])
    settings = {"max_new_tokens": MOST, "normalize_std": False}
    batch, mini_batches = to_batch([cut], AlgorithmConfig.model_validate({"overlong": "mask", **settings}))
    assert [each.length for each in batch.sequences] == [3], "the reward of the shortest one is the mean"
    assert batch.sequences[0].per_token["advantages"].tolist() == [-0.5] * 3
    assert mini_batches == [MiniBatch(1, LossDenominators(5, 2))]
    kept, _ = to_batch([cut], AlgorithmConfig.model_validate(settings))
    assert [each.length for each in kept.sequences] == [MOST, 3]
    masked = AlgorithmConfig.model_validate({"overlong": "mask", **settings})
    nothing, mini_batches = to_batch([group([MOST, MOST], [1.0, 0.0], overlong=[0, 1])], masked)
    assert (len(nothing), nothing.target_tokens, mini_batches) == (1, 0, [MiniBatch(1, LossDenominators(0, 1))])
    assert not group([MOST, MOST], [1.0, 0.0], overlong=[0, 1]).has_signal(masked)
    assert cut.has_signal(masked)


class Stopping(LiveRollout):
    """A replica whose completions have the greatest length; all but the first of a group end with a stop token."""

    async def generate_group(self, prompt_ids: Sequence[int], *, max_new_tokens: int, **more: Any) -> Sequence[Any]:
        answers = await super().generate_group(prompt_ids, max_new_tokens=max_new_tokens, **more)
        for answer in answers[1:]:
            answer.token_ids[-1] = STOP
        return answers


@pytest.mark.parametrize(
    ("overlong", "trained", "reward"), [("keep", 3, 1 / 3), ("drop", 2, 0.0), ("mask", 2, 0.0), ("penalty", 3, 1 / 3)]
)
def test_completions_without_a_stop_token_at_the_greatest_length_are_overlong(
    overlong: str, trained: int, reward: float
) -> None:
    world = World()
    world.add(Stopping(world, "rollout-0"))
    buffer = {"overlong_buffer": 2} if overlong == "penalty" else {}
    settings = {**ALGORITHM.model_dump(), "compute_zero_advantage": True, "overlong": overlong, **buffer}
    summary = run(world, first_is_better, algorithm=AlgorithmConfig.model_validate(settings))
    samples = summary.samples()
    assert (world.step, samples["groups_drawn"], samples["overlong_completions"]) == (6, 12, 12)
    assert (samples["completions_drawn"], samples["reward_drawn"]) == (36, pytest.approx(1 / 3))
    assert samples["reward_trained"] == pytest.approx(reward)
    assert {facts["sequences"] for facts in world.steps} == {2 * trained}


def test_a_run_in_which_every_completion_is_dropped_ends() -> None:
    algorithm = ALGORITHM.model_copy(update={"overlong": "drop"})
    with pytest.raises(
        TooManyFailuresError, match=r"of 100 groups in a row, fewer than two.*4 tokens.*Raise algorithm.max_new"
    ):
        run(World(), first_is_better, algorithm=algorithm)
