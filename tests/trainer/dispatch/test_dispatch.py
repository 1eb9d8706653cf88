"""`WorkerDispatch` against a model of itself, with real engines in this process: roles that take turns on a device compute, bit
for bit, what they would alone, and are where they should be."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import LOSSES, make_batch
from engine_ranks import TRAINER
from simulated_time import SimulatedTimeLoop
from transformers import AutoModelForTokenClassification
from waiting import HANG_S

from weightlane.ckpt_engines import ClosedError, ConfigError, DeadlineExceededError, ProtocolError, WeightlaneError
from weightlane.sync import CheckpointEngineConfig, Rendezvous, SyncConfig
from weightlane.trainer import LossDenominators, MicroBatch, TrainerConfig, sft
from weightlane.trainer.data.step_result import StepResult
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ranks import CallLimit, LocalRanks
from weightlane.trainer.dispatch.role import Role
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.objectives.loss import LossOutput, ModelOutputs

EVERYTHING = {"parameters", "gradients", "optimizer"}
NEEDED = {
    "forward": {"parameters"},
    "forward_backward": {"parameters", "gradients"},
    "optim_step": EVERYTHING,
    "publish": {"parameters"},
}
LOSS = {"policy": "policy", "critic": "valued", "reference": "sft"}
ROLES = list(LOSS)
ASKED = {"policy": ("logprobs", "entropy"), "critic": ("values",), "reference": ("logprobs",)}
BATCHES = [make_batch(step) for step in range(3)]
MINI_BATCH = LossDenominators.of(*BATCHES)


def specs(models: dict[str, Path]) -> list[RoleSpec]:
    config = TrainerConfig(device="cpu", micro_batch_tokens=30, **TRAINER)
    return [
        RoleSpec(role, config.model_copy(update={"head": head}), models[model], {"loss": LOSSES[LOSS[role]]})
        for role, head, model in (
            ("policy", "tokens", "qwen3-tied"),
            ("critic", "value", "qwen3-critic"),
            ("reference", "tokens", "llama-untied"),
        )
    ]


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines in the event loop in which the dispatches of all tests live."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def both(run: Run, models: dict[str, Path]) -> Iterator[tuple[WorkerDispatch, WorkerDispatch]]:
    """Roles that take turns on their device, and the same roles that don't."""
    sharing, plain = (
        WorkerDispatch(specs(models), {"trainer": LocalRanks(HANG_S)}, {"trainer": shares}) for shares in (True, False)
    )
    for dispatch in (sharing, plain):
        assert run(dispatch.start()) == {"policy": 0, "critic": 0, "reference": 0}
    yield sharing, plain
    for dispatch in (plain, sharing):  # the first one owns the process group
        run(dispatch.close())


def plain_data(value: Any) -> Any:
    """A result or an error in a form that compares bit for bit, without durations."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain_data(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_data(each) for each in value]
    if isinstance(value, StepResult):
        return asdict(replace(value, seconds=0.0, fence_s=0.0))
    if hasattr(value, "metrics"):
        return plain_data({"metrics": dict(value.metrics), "outputs": value.outputs})
    return str(value) if isinstance(value, Exception) else value


class Turns:
    """A model of roles that take turns: which parts are on the device, the gradients that were begun, and the steps taken."""

    def __init__(self, run: Run, both: tuple[WorkerDispatch, WorkerDispatch]) -> None:
        self._run, self._both = run, both
        self._here = {role: EVERYTHING - engine_of(both[0], role).offloaded for role in ROLES}
        self._begun = dict.fromkeys(ROLES, 0)
        self._steps = dict.fromkeys(ROLES, 0)

    def call(self, *calls: tuple[str, str, int]) -> None:
        """Make calls of both dispatches, all at once: a role, its method, and a batch. They return or raise the same."""
        found = []
        for dispatch in self._both:

            async def begun(dispatch: WorkerDispatch = dispatch) -> list[Any]:
                return await asyncio.gather(*(_begin(dispatch, *call) for call in calls), return_exceptions=True)

            found.append(plain_data(self._run(begun())))
        assert found[0] == found[1]
        for call, result in zip(calls, found[0], strict=True):
            self._note(*call, result)
        sharing, plain = self._both
        for role in ROLES:
            assert EVERYTHING - engine_of(sharing, role).offloaded == self._here[role]
            assert engine_of(plain, role).offloaded == set()

    def _note(self, role: str, method: str, batch: int, result: Any) -> None:
        kept = set() if method == "publish" else self._here[role]
        self._here = {**{other: set() for other in ROLES}, role: kept | NEEDED[method]}
        match method:
            case "forward":
                assert [len(each[ASKED[role][0]]) for each in result] == [s.length for s in BATCHES[batch].sequences]
            case "forward_backward":
                self._begun[role] += 1
            case "optim_step" if self._begun[role]:
                self._begun[role], self._steps[role] = 0, self._steps[role] + 1
                assert (result["step"], result["skipped"]) == (self._steps[role], "")
            case "optim_step":
                assert "there is no gradient for step" in result
            case "publish":  # there is no publisher, but it would find what it needs, and its replicas their room
                assert "publish was called before connect" in result


async def _begin(dispatch: WorkerDispatch, role: str, method: str, batch: int) -> Any:
    arguments: dict[str, tuple[Any, ...]] = {
        "forward": (BATCHES[batch], ASKED[role]),
        "forward_backward": (BATCHES[batch], "loss", MINI_BATCH, ASKED[role]),
        "optim_step": (),
        "publish": (1,),
    }
    return await getattr(dispatch[role], method)(*arguments[method])


def engine_of(dispatch: WorkerDispatch, role: str) -> Any:
    ranks: Any = dispatch[role]._group.ranks
    return ranks._worker._roles[role].engine


def test_roles_that_share_a_device_compute_what_they_would_alone_and_are_where_they_should_be(
    run: Run, both: tuple[WorkerDispatch, WorkerDispatch]
) -> None:
    turns, rng = Turns(run, both), random.Random(0)
    methods = ["forward", "forward_backward", "forward_backward", "optim_step", "optim_step", "publish"]
    calls = [(role, method, rng.randrange(len(BATCHES))) for role in ROLES for method in methods]
    rng.shuffle(calls)
    turns.call(("policy", "forward", 0), ("critic", "forward", 1), ("policy", "forward", 1))
    while calls:
        turns.call(calls.pop())
    turns.call(
        ("critic", "forward", 2), ("policy", "forward", 0), ("reference", "forward", 1), ("policy", "forward", 1)
    )
    for role in ROLES:
        for method in ("forward_backward", "optim_step", "publish"):  # moments are here, and go
            turns.call((role, method, 0))


def test_a_role_is_saved_and_loaded_whatever_was_away(
    run: Run, both: tuple[WorkerDispatch, WorkerDispatch], tmp_path: Path
) -> None:
    sharing, _ = both
    policy, critic = sharing["policy"], sharing["critic"]

    async def train(role: Role) -> Any:
        await role.forward_backward(BATCHES[0], "loss")
        return plain_data(await role.optim_step())

    async def save_and_load() -> None:
        first = await train(policy)
        await critic.forward(BATCHES[0], ("values",))
        await policy.save(tmp_path / "policy")
        assert engine_of(sharing, "policy").offloaded == {"gradients"}
        second = await train(policy)
        await critic.save(tmp_path / "critic")
        assert await policy.load(tmp_path / "policy") == first["step"]
        assert await train(policy) == second
        assert second["step"] == first["step"] + 1
        await critic.export_hf(tmp_path / "model", "bfloat16")
        assert "parameters" not in engine_of(sharing, "critic").offloaded

    run(save_and_load())
    assert AutoModelForTokenClassification.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_a_role_that_takes_turns_is_published_and_one_that_is_frozen_cannot_be_trained(
    run: Run, models: dict[str, Path]
) -> None:
    policy, _, reference = specs(models)
    experts = replace(policy, model_dir=models["qwen3-moe"])
    still = replace(reference, config=reference.config.model_copy(update={"frozen": True}))
    dispatch = WorkerDispatch([experts, still], {"trainer": LocalRanks(HANG_S)}, {"trainer": True})
    rendezvous = Rendezvous.host("127.0.0.1", 0, HANG_S)

    async def use() -> None:
        await dispatch.start()
        role = dispatch["policy"]
        said = await dispatch["reference"].forward(BATCHES[0])
        await role.connect(
            rendezvous.address.to_plain(),
            CheckpointEngineConfig(backend="shm"),
            SyncConfig(deadline_s=HANG_S),
            torch.bfloat16,
        )
        assert role.publisher_names() == ["trainer-0"]
        for version in range(2):
            await role.publish(version)
            assert engine_of(dispatch, "policy").offloaded == {"gradients", "optimizer"}
            await dispatch["reference"].forward(BATCHES[0])
            await role.forward_backward(BATCHES[0], "loss")
            assert (await role.optim_step()).step == version + 1
        with pytest.raises(WeightlaneError, match=r"frozen, since trainer\.frozen is true"):
            await dispatch["reference"].forward_backward(BATCHES[0], sft)
        with pytest.raises(ProtocolError, match="a part of the mini-batch has no gradient"):
            await dispatch["reference"].optim_step()
        assert plain_data(await dispatch["reference"].forward(BATCHES[0])) == plain_data(said)

    try:
        run(use())
    finally:
        run(dispatch.close())
        run(dispatch.close())
        rendezvous.close()


def test_calls_to_roles_on_other_ranks_overlap(run: Run, models: dict[str, Path]) -> None:
    """The critic's call ends while the policy's waits for it, in the middle of its loss."""
    let_go, waiting = threading.Event(), threading.Event()

    def waits(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        waiting.set()
        assert let_go.wait(HANG_S)
        return sft(outputs, micro)

    policy, critic, _ = specs(models)
    dispatch = WorkerDispatch(
        [policy, replace(critic, group="critics")], {name: LocalRanks(HANG_S) for name in ("trainer", "critics")}
    )

    async def overlap() -> None:
        await dispatch.start()
        training = dispatch["policy"].forward_backward(BATCHES[0], waits)
        stepping = dispatch["policy"].optim_step()
        assert await asyncio.to_thread(waiting.wait, HANG_S)
        values = await dispatch["critic"].forward(BATCHES[0], ("values",))
        assert (len(values), training.done(), stepping.done()) == (len(BATCHES[0]), False, False)
        let_go.set()
        assert (await training).metrics["tokens"] == BATCHES[0].target_tokens
        assert (await stepping).step == 1
        assert engine_of(dispatch, "policy").offloaded == set(), "it has its ranks for itself"

    try:
        run(overlap())
    finally:
        let_go.set()
        run(dispatch.close())


def test_roles_that_cannot_be_placed_so_are_refused(models: dict[str, Path]) -> None:
    policy, critic, _ = specs(models)
    here = {"trainer": LocalRanks()}
    many = replace(policy, config=policy.config.model_copy(update={"ranks": 2}))
    for roles, says in (
        ([policy, replace(critic, name="policy")], "two roles are called 'policy'"),
        ([replace(policy, group="elsewhere")], r"group 'elsewhere', which is not there.*Groups are trainer"),
        ([many], r"'policy' has 2 ranks, and its group 'trainer' 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            WorkerDispatch(roles, here)
    dispatch = WorkerDispatch([policy], here)
    assert ("policy" in dispatch, "critic" in dispatch) == (True, False)
    with pytest.raises(ProtocolError, match=r"no role 'critic'.*The roles are policy"):
        dispatch["critic"]


def test_a_call_that_waits_for_earlier_ones_has_its_whole_time_after_them() -> None:
    limit = CallLimit(10.0, "trainer ranks", "trainer.call_timeout_s")

    async def answer(seconds: float) -> list[Any]:
        await asyncio.sleep(seconds)
        return [seconds]

    async def begun_together() -> list[Any]:
        calls = {"one": 6.0, "two": 15.0, "three": 1000.0}
        begun = [asyncio.create_task(limit.answer(answer(seconds), name)) for name, seconds in calls.items()]
        await asyncio.sleep(24.9)  # ten seconds after the second one ended at 15
        waits = not begun[2].done()
        await asyncio.sleep(0.2)
        assert waits
        assert begun[2].done()
        return await asyncio.gather(*begun, return_exceptions=True)

    async def closed() -> None:
        ranks = LocalRanks()
        await ranks.call("pid")
        assert {each.daemon for each in threading.enumerate() if each.name.startswith("local-rank")} == {True}
        await ranks.close()
        with pytest.raises(ClosedError, match="the rank is closed"):
            ranks.call("pid")

    asyncio.run(closed())
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        one, two, three = runner.run(begun_together())
    assert (one, two) == ([6.0], [15.0])
    assert isinstance(three, DeadlineExceededError)
    assert "three was not answered within 10 s" in str(three)
