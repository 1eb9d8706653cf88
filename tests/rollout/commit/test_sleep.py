"""Real vLLM sleeps: its memory goes back to the kernel, and after waking and a commit it is a fresh load, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from running_replica import PROMPT, Setup

from weightlane.ckpt_engines import ProtocolError, QuarantinedError, SyncAbortedError
from weightlane.rollout.contract.engine import SleepPart
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PARTS: tuple[SleepPart, ...] = ("weights", "caches")
FREED = {"weights": 0, "caches": 0}
LONG = [number % 250 for number in range(300)]
"""A prompt of more than a block of the prefix cache."""


@pytest.fixture
def in_turns(setup: Setup) -> Iterator[Setup]:
    """The replica takes versions in place, as in a run with ``trainer.colocate``, and serves the first one."""
    setup.replica.configure(commit="in_place")
    setup.connect(retries=0)
    setup.serve(1)
    yield setup
    for part in PARTS:  # for other tests, if this one has failed
        setup.run(setup.replica.wake(part))


def test_memory_is_freed_and_the_next_version_is_a_fresh_load_beside_everything_that_no_version_has(
    in_turns: Setup,
) -> None:
    kept = in_turns.probe("probe_kept")
    assert all(kept), "tables of rotary embeddings, at least"
    old = in_turns.greedy(LONG)
    caches = in_turns.probe("probe_touch_caches")
    awake = in_turns.run(in_turns.replica.memory_use())

    async def sleep() -> list[int]:
        flying = asyncio.create_task(in_turns.replica.generate("r", PROMPT, 30))
        await in_turns.tokens(1)
        await in_turns.replica.sleep()
        return list((await flying).token_ids)

    assert len(in_turns.run(sleep())) == 30, "requests in flight end first"
    in_turns.run(in_turns.replica.sleep())
    asleep = in_turns.run(in_turns.replica.memory_use())
    for before, after, nbytes in zip(awake, asleep, caches, strict=True):
        assert before.held_bytes - after.held_bytes > 0.9 * nbytes
        assert after.peak_bytes - after.held_bytes > 0.9 * nbytes
    assert in_turns.probe("probe_resident") == [FREED] * in_turns.world
    assert in_turns.probe("probe_kept") == kept
    assert not in_turns.replica.stats().serving
    with pytest.raises(QuarantinedError, match="asleep: it has no weights"):
        in_turns.greedy(PROMPT)
    with pytest.raises(ProtocolError, match="before the weights"):
        in_turns.run(in_turns.replica.wake("caches"))

    in_turns.run(in_turns.replica.wake("weights"))
    in_turns.run(in_turns.trainer.sync(in_turns.models[1]))
    with pytest.raises(QuarantinedError, match="asleep: it has no caches"):
        in_turns.greedy(PROMPT)
    in_turns.run(in_turns.replica.wake("caches"))
    in_turns.check(1)
    assert in_turns.probe("probe_kept") == kept
    again = in_turns.greedy(LONG)
    assert (again.token_ids, again.logprobs) == (old.token_ids, old.logprobs)
    in_turns.serve(2)
    in_turns.check(2)


def test_a_version_that_comes_during_sleep_and_weights_that_cannot_wake_serve_nobody(in_turns: Setup) -> None:
    in_turns.run(in_turns.replica.sleep())
    with pytest.raises(SyncAbortedError, match="the weights are asleep"):
        in_turns.run(in_turns.trainer.sync(in_turns.models[2]))
    assert in_turns.trainer.states == {"rollout-0": ReplicaState.QUARANTINED}
    assert in_turns.probe("probe_resident") == [FREED] * in_turns.world, "nothing was written"
    in_turns.probe("probe_fail_waking", in_turns.world - 1)
    with pytest.raises(QuarantinedError, match="out of memory, on purpose"):
        in_turns.run(in_turns.replica.wake("weights"))
    with pytest.raises(QuarantinedError, match=r"did not wake its weights: .*out of memory, on purpose"):
        in_turns.greedy(PROMPT)
    in_turns.run(in_turns.replica.wake("weights"))
    in_turns.run(in_turns.replica.wake("caches"))
    with pytest.raises(QuarantinedError):
        in_turns.greedy(PROMPT)  # it is awake, and has no version
    in_turns.serve(2)
    in_turns.check(2)
