"""Commits on real vLLM give exact weights, exact tokens and exact version stamps, and every failure ends in a safe state."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from running_replica import Setup, slow_steps
from tiny_models import check_switch, greedy_tokens, is_greedy, load_tensors

from weightlane.ckpt_engines import (
    CommitError,
    ConfigError,
    QuarantinedError,
    SyncAbortedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.rollout import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_every_version_is_copied_bit_for_bit_and_decodes_as_in_transformers_even_when_staging_memory_is_overwritten(
    setup: Setup,
) -> None:
    for model in (1, 2):
        setup.serve(model)
        sent = sum(tensor.nbytes for tensor in load_tensors(setup.models[model]).values())
        assert min(setup.probe("probe_poison_staging")) >= sent
        setup.check(model)
    assert setup.probe("probe_way") == [["traced", ""]] * setup.world


def test_requests_in_flight_switch_models_exactly_where_their_version_stamps_say(setup: Setup) -> None:
    old = setup.serve(1)
    _, completions = setup.sync_in_flight(2)
    report = setup.replica.report
    assert report.in_flight == 4
    assert 0.0 < report.load_s < report.blocked_s
    assert report.recomputed_tokens >= sum(len(prompt) for prompt, _ in completions)
    assert setup.replica.stats().commit_gaps_s[report.version] > 0.0
    for prompt, completion in completions:
        assert completion.versions[0] == old
        check_switch(completion, prompt, *setup.models[1:])
        boundary = completion.versions.index(old + 1)
        before, after = completion.token_ids[:boundary], completion.token_ids[boundary:]
        assert not is_greedy(setup.models[1], [*prompt, *before], after)


def test_the_prefix_cache_never_serves_blocks_of_older_weights(setup: Setup) -> None:
    prompt = [(7 * position) % 290 for position in range(400)]
    for model in (1, 2):
        setup.serve(model)
        wanted = greedy_tokens(setup.models[model], prompt, 16)
        for _ in range(2):
            assert setup.greedy(prompt).token_ids == wanted


def test_keep_spares_caches_in_flight_but_gives_new_requests_none_of_them(setup: Setup) -> None:
    prompt = [(11 * position) % 290 for position in range(400)]
    old = setup.serve(1, "keep")

    async def sync_meanwhile() -> tuple[Completion, Completion]:
        async with slow_steps(setup.replica):
            long = asyncio.create_task(setup.replica.generate("long", prompt, 60, greedy=True))
            await setup.tokens(5)
            await setup.trainer.sync(setup.models[2])
        new = await setup.replica.generate("new", prompt, 16, greedy=True)
        return await long, new

    long, new = setup.run(sync_meanwhile())
    assert new.token_ids == greedy_tokens(setup.models[2], prompt, 16)
    assert set(new.versions) == {old + 1}
    boundary = long.versions.index(old + 1)
    # The old caches still have their say: this is neither the new model's continuation nor the old one's.
    after = long.token_ids[boundary:]
    assert is_greedy(setup.models[1], prompt, long.token_ids[:boundary])
    assert not is_greedy(setup.models[2], [*prompt, *long.token_ids[:boundary]], after)


def test_only_the_given_stop_tokens_end_a_completion_and_stop_strings_need_the_models_tokenizer(setup: Setup) -> None:
    setup.serve(1)
    free = setup.greedy([9, 9], 32)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    stopped = setup.run(setup.replica.generate("r", [9, 9], 32, greedy=True, stop_ids=[stop]))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    with pytest.raises(ConfigError, match="stop strings need the model's tokenizer: its files are missing"):
        setup.run(setup.replica.generate("r", [9, 9], 32, stop_strings=["w5"]))


def test_a_version_that_is_not_staged_and_bad_fields_are_refused_by_name_and_change_nothing(setup: Setup) -> None:
    version = setup.serve(2)
    with pytest.raises(CommitError, match="not staged"):
        setup.run(setup.replica.commit(777))
    with pytest.raises(CommitError, match="not kept"):
        setup.run(setup.replica.rollback(version))  # everybody serves it
    setup.run(setup.replica.rollback(version + 1))  # which it has never taken
    assert setup.replica.version == version
    with pytest.raises(UntouchedError, match=r"ConfigError: .*version"):
        setup.run(setup.replica.commit(-1))
    with pytest.raises(ConfigError, match="2000"):
        setup.greedy([1] * 2000)
    with pytest.raises(ConfigError, match="temperature"):
        setup.run(setup.replica.generate("r", [1], 4, temperature=-1.0))
    with pytest.raises(ConfigError, match="backend"):
        setup.run(setup.replica.connect({}, ""))
    setup.check(2)
    # A refused connect leaves no subscriber, so nothing can be committed until the next one.
    with pytest.raises(WeightlaneError, match="before this rank was connected"):
        setup.run(setup.replica.commit(1))
    setup.connect()
    setup.serve(1)
    setup.check(1)


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_a_commit_that_is_given_up_while_loading_stops_the_replica_and_the_next_one_heals_it(
    setup: Setup, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.serve(1)
    setup.probe("probe_hold", "commit", str(tmp_path))
    patient_s = setup.replica.config.commit_timeout_s
    setup.replica.configure(commit_timeout_s=1234.0)
    timeouts: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def expires_when_told(seconds: float | None) -> asyncio.Timeout:
        made = timeout(seconds)
        if seconds == 1234.0:
            timeouts.append(made)
        return made

    monkeypatch.setattr(asyncio, "timeout", expires_when_told)

    async def give_up_meanwhile() -> None:
        syncing = asyncio.create_task(setup.trainer.sync(setup.models[2]))
        await setup.held(tmp_path)
        if how == "cancelled":
            monkeypatch.setattr("weightlane.sync.control.coordinator.coordinator._CANCELLED_S", 0.0)
            syncing.cancel()
        else:
            timeouts[-1].reschedule(asyncio.get_running_loop().time())
        while setup.replica.stats().serving:  # noqa: ASYNC110 - a commit that may go on earlier could end in time
            await asyncio.sleep(0.001)
        (tmp_path / "go").touch()
        await syncing

    if how == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            setup.run(give_up_meanwhile())
    else:
        with pytest.raises(SyncAbortedError, match="not replaced within") as raised:
            setup.run(give_up_meanwhile())
        assert isinstance(raised.value.reason, QuarantinedError)
    setup.replica.configure(commit_timeout_s=patient_s)
    assert not setup.replica.stats().serving
    with pytest.raises(QuarantinedError, match="serves again after the next commit"):
        setup.greedy([1, 2])
    setup.probe("probe_hold", "commit", "")
    setup.serve(2)
    setup.check(2)


def test_a_killed_rank_ends_requests_and_commits_with_an_error_that_names_the_replica(setup: Setup) -> None:
    """The last test of this engine: nothing of it is left."""
    *_, pid = setup.probe("probe_process")

    async def kill_meanwhile() -> None:
        flying = asyncio.create_task(setup.replica.generate("r", [1, 2], 900))
        await setup.tokens(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="rollout-0"):
            await flying

    setup.run(kill_meanwhile())
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        setup.run(setup.replica.commit(778))
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        setup.run(setup.replica.sleep())
    with pytest.raises(WorkerDiedError, match="rollout-0"):
        setup.greedy([1, 2])
    assert not setup.replica.stats().serving
