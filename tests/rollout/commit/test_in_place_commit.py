"""Real vLLM takes versions in place: exact weights and tokens, nothing staged, and a mixture serves nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from running_replica import PROMPT, Setup
from tiny_models import check_switch

from weightlane.ckpt_engines import PeerLostError, QuarantinedError, SyncAbortedError
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def in_place(setup: Setup) -> Setup:
    """The replica takes versions in place, for one test."""
    changed = {"commit": "in_place", "staging_limit_bytes": 1 << 20}
    setup.replica.configure(**changed)
    setup.connect("gloo")
    return setup


def test_parameters_are_those_of_the_version_nothing_is_staged_and_requests_in_flight_wait(in_place: Setup) -> None:
    old = in_place.serve(1)
    assert in_place.probe("probe_poison_staging") == [0] * in_place.world
    in_place.check(1)
    report, completions = in_place.sync_in_flight(2)
    assert 0 < in_place.replica.report.load_s < in_place.replica.report.blocked_s
    assert report.rollout_blocked_s == in_place.replica.report.blocked_s, "the whole pause"
    for prompt, completion in completions:
        assert completion.versions[0] == old
        check_switch(completion, prompt, *in_place.models[1:])
    in_place.check(2)


def test_deltas_follow_and_are_taken_from_what_was_written_in_place(in_place: Setup) -> None:
    in_place.connect(codec="delta")
    in_place.serve(1)
    assert in_place.nudge().codec == "delta"
    assert in_place.probe("probe_takes_deltas") == [True] * in_place.world
    in_place.check(in_place.trainer.live)


def test_a_trainer_that_leaves_half_way_ends_requests_and_leaves_a_mixture_out_of_service(
    in_place: Setup, tmp_path: Path
) -> None:
    in_place.connect("gloo", retries=0)  # nobody comes back
    in_place.serve(1)
    in_place.probe("probe_hold", "write_elements", str(tmp_path), 2)

    async def leave_meanwhile() -> SyncAbortedError:
        flying = asyncio.create_task(in_place.replica.generate("r", PROMPT, 900))
        await in_place.tokens(10)
        syncing = asyncio.create_task(in_place.trainer.sync(in_place.models[2]))
        await in_place.held(tmp_path)
        await asyncio.to_thread(in_place.trainer._publisher.close)
        (tmp_path / "go").touch()
        with pytest.raises(SyncAbortedError) as caught:
            await syncing
        with pytest.raises(QuarantinedError):
            await flying
        return caught.value

    aborted = in_place.run(leave_meanwhile())
    in_place.probe("probe_hold", "write_elements", "")
    assert isinstance(aborted.reason, PeerLostError), aborted
    assert in_place.trainer.states == {"rollout-0": ReplicaState.QUARANTINED}
    assert not in_place.replica.stats().serving
    with pytest.raises(QuarantinedError, match="a mixture of two versions"):
        in_place.greedy(PROMPT)
    in_place.connect("gloo")
    assert not in_place.replica.stats().serving, "only a version makes it serve again"
    in_place.serve(2)
    in_place.check(2)
