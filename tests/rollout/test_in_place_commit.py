"""Real vLLM takes versions in place: exact weights and tokens, nothing staged, and a mixture serves nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_worker import Setup
from test_delta_commit import check, nudge
from tiny_models import greedy_tokens, is_greedy

from weightlane.ckpt_engines import (
    PeerLostError,
    QuarantinedError,
    SyncAbortedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.faulty import read_fault_log
from weightlane.rollout import Completion
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [5, 6, 7]


@pytest.fixture
def in_place(setup: Setup) -> Iterator[Setup]:
    """The worker takes versions in place, for one test."""
    staged = setup.worker.config
    setup.worker.config = staged.model_copy(update={"commit": "in_place", "staging_limit_bytes": 1 << 20})
    setup.trainer.close()
    setup.new_trainer("gloo")
    setup.connect()
    yield setup
    setup.worker.config = staged
    setup.trainer.close()
    setup.new_trainer()
    setup.connect()


def reconnect(setup: Setup, backend: str, options: dict[str, Any] | None = None, receivers: str = "") -> None:
    """A new trainer, with `receivers` as the other end of its engine."""
    setup.trainer.close()
    setup.trainer = type(setup.trainer)(setup.models[0], backend, options)
    setup.run(setup.worker.connect(setup.trainer.address, receivers or backend, options))
    setup.run(setup.trainer.connect([setup.worker]))
    setup.trainer.version = setup.worker.version


@pytest.mark.parametrize("backend", ["gloo", "shm", "filesystem"])
def test_parameters_and_tokens_are_those_of_the_version_and_nothing_is_staged(
    in_place: Setup, backend: str, tmp_path: Path
) -> None:
    setup = in_place
    reconnect(setup, backend, {"path": str(tmp_path)} if backend == "filesystem" else None)
    for model in (1, 2, 1):
        version = setup.serve(model)
        assert setup.probe("probe_poison_staging") == [0] * setup.world
        setup.check_parameters(model)
        completion = setup.greedy(PROMPT)
        assert completion.token_ids == greedy_tokens(setup.models[model], PROMPT, 16)
        assert completion.versions == [version] * 16


def test_a_version_before_which_nothing_was_shown_is_shown_with_the_checkpoint_first(in_place: Setup) -> None:
    setup = in_place
    setup.serve(2)
    setup.probe("probe_forget_layout")
    setup.trainer.close()
    setup.new_trainer("gloo")
    setup.connect()
    assert setup.greedy(PROMPT).token_ids == greedy_tokens(setup.models[2], PROMPT, 16)
    setup.serve(1)
    setup.check_parameters(1)
    assert setup.probe("probe_way") == [["traced", ""]] * setup.world


def test_requests_in_flight_wait_and_switch_models_where_their_stamps_say(in_place: Setup) -> None:
    setup = in_place
    old = setup.serve(1)

    async def sync_meanwhile() -> list[Completion]:
        prompts = [[10 + index, 20, 30] for index in range(4)]
        tasks = [asyncio.create_task(setup.worker.generate("r", prompt, 400, greedy=True)) for prompt in prompts]
        await setup.tokens(100)
        report = await setup.trainer.sync(setup.models[2])
        assert 0 < setup.worker.report.load_s < setup.worker.report.blocked_s
        assert report.rollout_blocked_s == setup.worker.report.blocked_s, "the whole pause"
        return await asyncio.gather(*tasks)

    for index, completion in enumerate(setup.run(sync_meanwhile())):
        prompt, boundary = [10 + index, 20, 30], completion.versions.index(old + 1)
        assert completion.versions == [old] * boundary + [old + 1] * (400 - boundary)
        before, after = completion.token_ids[:boundary], completion.token_ids[boundary:]
        assert is_greedy(setup.models[1], prompt, before)
        assert is_greedy(setup.models[2], [*prompt, *before], after)


def test_deltas_follow_and_are_taken_from_what_was_written_in_place(in_place: Setup, tmp_path: Path) -> None:
    setup = in_place
    setup.trainer.close()
    setup.new_trainer(codec="delta")
    setup.connect()
    setup.serve(1)
    nudge(setup, setup.trainer.version)
    assert setup.run(setup.trainer.sync_live()).codec == "delta"
    assert setup.probe("probe_takes_deltas") == [True] * setup.world
    check(setup, dict(setup.trainer.live), tmp_path / "changed")


def torn(setup: Setup, error: WeightlaneError) -> None:
    """The replica is out of service, and says why; the next version heals it."""
    assert setup.trainer.states == {"rollout-0": ReplicaState.QUARANTINED}, error
    assert not setup.worker.stats().serving
    with pytest.raises(QuarantinedError, match="a mixture of two versions"):
        setup.greedy(PROMPT)


def heal(setup: Setup) -> None:
    reconnect(setup, "gloo")
    assert not setup.worker.stats().serving, "only a version makes it serve again"
    version = setup.serve(2)
    setup.check_parameters(2)
    completion = setup.greedy(PROMPT)
    assert completion.token_ids == greedy_tokens(setup.models[2], PROMPT, 16)
    assert set(completion.versions) == {version}


def test_a_corrupted_bucket_leaves_a_mixture_out_of_service_or_the_old_version_serving(
    in_place: Setup, tmp_path: Path
) -> None:
    setup = in_place
    seen = set()
    for seed in range(20):
        setup.serve(1)
        held = setup.probe("probe_parameters")
        log = tmp_path / f"faults-{seed}"
        flips = {"inner": {}, "seed": seed, "rate": 0.3, "kinds": ["flip"], "log": str(log)}
        setup.trainer.close()
        setup.new_trainer("gloo")
        setup.run(setup.worker.connect(setup.trainer.address, "faulty:gloo", flips))
        setup.run(setup.trainer.connect([setup.worker]))
        setup.trainer.version = setup.worker.version
        try:
            setup.run(setup.trainer.sync(setup.models[2]))
        except SyncAbortedError as error:
            aborted = error
        else:  # chance spares every bucket now and then
            assert not read_fault_log(log), "changed bytes were served"
            setup.check_parameters(2)
            reconnect(setup, "gloo")
            continue
        assert "arrived with changed bytes" in str(aborted)
        seen.add(serving := setup.worker.stats().serving)
        if serving:
            assert setup.probe("probe_parameters") == held
            assert setup.greedy(PROMPT).token_ids == greedy_tokens(setup.models[1], PROMPT, 16)
            reconnect(setup, "gloo")
        else:
            torn(setup, aborted)
            heal(setup)
        if False in seen:
            return
    raise AssertionError(f"only {seen}")


def test_a_trainer_that_leaves_half_way_ends_requests_and_leaves_a_mixture_out_of_service(
    in_place: Setup, tmp_path: Path
) -> None:
    setup = in_place
    setup.trainer.close()
    setup.new_trainer("gloo")
    setup.connect(retries=0)  # nobody comes back
    setup.serve(1)
    setup.probe("probe_hold", "write_part", str(tmp_path), 2)

    async def leave_meanwhile() -> SyncAbortedError:
        flying = asyncio.create_task(setup.worker.generate("r", PROMPT, 900))
        await setup.tokens(10)
        syncing = asyncio.create_task(setup.trainer.sync(setup.models[2]))
        await setup.held(tmp_path)
        await asyncio.to_thread(setup.trainer._publisher.close)
        (tmp_path / "go").touch()
        with pytest.raises(SyncAbortedError) as caught:
            await syncing
        with pytest.raises(QuarantinedError):
            await flying
        return caught.value

    aborted = setup.run(leave_meanwhile())
    setup.probe("probe_hold", "write_part", "")
    assert isinstance(aborted.reason, PeerLostError), aborted
    torn(setup, aborted)
    heal(setup)
