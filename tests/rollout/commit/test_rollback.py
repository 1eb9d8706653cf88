"""A version that fails, or that too few take, is undone bit for bit on real vLLM; what cannot be undone serves nobody."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest
from publishing import served_by
from running_replica import PROMPT, Setup, slow_steps
from tiny_models import greedy_tokens, is_greedy

from weightlane.ckpt_engines import QuarantinedError, SyncAbortedError, UntouchedError
from weightlane.rollout import Completion
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def spans(completion: Completion) -> list[tuple[int, int]]:
    """Versions in the order in which they generated, and how many tokens each."""
    return [(version, len(list(tokens))) for version, tokens in groupby(completion.versions)]


def test_a_version_that_too_few_replicas_take_is_taken_back_bit_for_bit_and_tokens_name_what_generated_them(
    setup: Setup,
) -> None:
    setup.connect(quorum=1.0, with_another=True)
    [other] = setup.others
    old = setup.serve(1)

    async def it_has_generated(version: int) -> None:
        await served_by(setup.replica)(version)
        await setup.tokens(5)

    async def sync_in_vain() -> Completion:
        other.before_refusal = it_has_generated
        async with slow_steps(setup.replica):
            flying = asyncio.create_task(setup.replica.generate("r", PROMPT, 80, greedy=True))
            await setup.tokens(5)
            with pytest.raises(SyncAbortedError, match="not for this replica"):
                await setup.trainer.sync(setup.models[2])
        return await flying

    flown = setup.run(sync_in_vain())
    assert setup.replica.version == old
    assert set(setup.trainer.states.values()) == {ReplicaState.SERVING}
    setup.check(1)

    (first, before), (second, between), (third, after) = spans(flown)
    assert (first, second, third) == (old, old + 1, old)
    tokens, seen = flown.token_ids, before + between
    assert is_greedy(setup.models[1], PROMPT, tokens[:before])
    assert is_greedy(setup.models[2], [*PROMPT, *tokens[:before]], tokens[before:seen])
    assert not is_greedy(setup.models[1], [*PROMPT, *tokens[:before]], tokens[before:seen])
    assert is_greedy(setup.models[1], [*PROMPT, *tokens[:seen]], tokens[seen:])
    # The prefix cache may hold blocks of these tokens that the other version has computed.
    longer = [*PROMPT, *tokens[: seen + after // 2]]
    assert setup.greedy(longer).token_ids == greedy_tokens(setup.models[1], longer, 16)

    # Both take the next one.
    other.before_refusal = None
    setup.serve(2)
    setup.check(2)


def test_a_load_that_fails_half_way_on_one_rank_is_undone_by_the_same_call(setup: Setup) -> None:
    old = setup.serve(1)
    setup.probe("probe_fail_loading", 1, 9, 1)

    async def fail_meanwhile() -> Completion:
        async with slow_steps(setup.replica):
            flying = asyncio.create_task(setup.replica.generate("r", PROMPT, 60, greedy=True))
            await setup.tokens(5)
            with pytest.raises(SyncAbortedError, match=r"rollout rank 1.*was restored.*on purpose") as raised:
                await setup.trainer.sync(setup.models[2])
        assert type(raised.value.reason) is UntouchedError
        return await flying

    flown = setup.run(fail_meanwhile())
    assert setup.trainer.states == {"rollout-0": ReplicaState.SERVING}
    assert setup.replica.version == old
    setup.check(1)
    assert set(flown.versions) == {old}
    assert is_greedy(setup.models[1], PROMPT, flown.token_ids)
    setup.serve(2)
    setup.check(2)


def test_what_cannot_be_undone_serves_nobody_until_a_whole_version_commits(setup: Setup) -> None:
    setup.serve(1)
    setup.probe("probe_fail_loading", 0, 9, 2)

    async def fail_meanwhile() -> None:
        flying = asyncio.create_task(setup.replica.generate("r", [1, 2], 900))
        await setup.tokens(10)
        with pytest.raises(SyncAbortedError, match=r"mixture.*rollout rank 0.*on purpose") as raised:
            await setup.trainer.sync(setup.models[2])
        assert isinstance(raised.value.reason, QuarantinedError)
        with pytest.raises(QuarantinedError, match="mixture"):
            await flying

    setup.run(fail_meanwhile())
    assert not setup.replica.stats().serving
    assert setup.trainer.states == {"rollout-0": ReplicaState.QUARANTINED}
    with pytest.raises(QuarantinedError, match=r"mixture.*serves again after the next commit"):
        setup.greedy([1, 2])
    with pytest.raises(QuarantinedError, match=r"earlier commit failed half-way|not staged"):
        setup.run(setup.replica.commit(777))
    with pytest.raises(QuarantinedError):
        setup.run(setup.replica.rollback(setup.replica.version))
    assert not setup.replica.stats().serving
    setup.serve(2)
    setup.check(2)
