"""Checks of versions that fail, and of replicas that are taken out of service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from weightlane.ckpt_engines import CommitError, QuarantinedError, SyncAbortedError, UntouchedError, WeightlaneError

from ...contract.records import Completion
from ..models import PROMPT
from ..publishing import OneRankTrainer, RefusingReplica
from ..serving import Serving
from .base import LOGPROB_LIMIT, References, RolloutConformanceBase, Weights, expect_greedy, failure_of

_NEVER_STAGED = 1_000
"""Added to the version that serves, this is none that was published."""


class FailureChecks(RolloutConformanceBase):
    """Checks of versions that fail. Afterwards the old one serves bit for bit: the same tokens, log-probabilities and stamps.

    Of a replica that refuses seeds, and so may round differently each time, the log-probabilities are within 1e-4.
    """

    def test_a_version_that_was_never_staged_changes_nothing(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Its commit is an `UntouchedError`, also while requests are in flight; the next version is committed."""
        version = serving.serve(weights(1))
        before = answer(serving)

        async def refused() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                calls = (serving.replica.generate("r", PROMPT, 48, greedy=True) for _ in range(2))
                tasks = [group.create_task(call) for call in calls]
                await serving.tokens(2, tasks)
                commit = serving.replica.commit(version + _NEVER_STAGED)
                await failure_of(commit, UntouchedError, "the commit of a version that was never staged")
            return [task.result() for task in tasks]

        for found in serving.run(refused(), "completions beside a commit that fails"):
            expect_greedy(found, PROMPT, {version: reference(1)}, "a completion beside a commit that fails")
        expect_same(serving, before, "a commit that failed")
        later = serving.serve(weights(2))
        expect_greedy(serving.greedy(), PROMPT, {later: reference(2)}, "the completion after a commit that failed")

    def test_a_version_of_another_shape_is_refused(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """A tensor with a row too many, or one that is missing: a typed error, before anything changes."""
        serving.serve(weights(1))
        before = answer(serving)
        name = next(name for name, tensor in weights(1).items() if tensor.dim() > 1)
        longer = {**weights(1), name: torch.cat([weights(1)[name], weights(1)[name][:1]])}
        fewer = {each: tensor for each, tensor in weights(1).items() if each != name}
        for tensors, misfit in ((longer, "has a row too many"), (fewer, "is missing")):

            async def publish(tensors: Mapping[str, torch.Tensor] = tensors) -> None:
                await serving.connect(tensors, self.backend, self.backend_options)
                await serving.sync(tensors)

            what = f"a version in which {name} {misfit}"
            serving.run(failure_of(publish(), WeightlaneError, what), what)
            expect_same(serving, before, what)
        self.connect(serving, weights(0))
        later = serving.serve(weights(2))
        expect_greedy(
            serving.greedy(), PROMPT, {later: reference(2)}, "the completion after versions that were refused"
        )

    def test_a_version_that_another_replica_refuses_is_rolled_back(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """The version before serves again, bit for bit; the tokens of requests in flight switch back where their stamps do."""
        if serving.replica.config.commit == "in_place":
            pytest.skip("a version that was committed in place cannot be rolled back")
        others: list[RefusingReplica] = []
        in_flight: list[asyncio.Task[Completion]] = []

        def another(trainer: OneRankTrainer) -> list[RefusingReplica]:
            others.append(RefusingReplica("rollout-1", trainer))
            return others

        async def served(version: int) -> None:
            while serving.replica.version != version:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)
            in_flight.append(asyncio.create_task(serving.replica.generate("r", PROMPT, 192, greedy=True)))
            await serving.tokens(4, in_flight)

        async def abort() -> Completion:
            await failure_of(serving.sync(weights(2)), SyncAbortedError, "a version that another replica refuses")
            return await in_flight[0]

        try:
            self.connect(serving, weights(0), more=another)
            old = serving.serve(weights(1))
            before = answer(serving)
            others[0].before_refusal = served
            found = serving.run(abort(), "a version that is aborted")
            expect_greedy(found, PROMPT, {old: reference(1), old + 1: reference(2)}, "a completion across a rollback")
            assert found.versions[0] == old + 1, (
                f"expected version {old + 1} to have served, it was {found.versions[0]}"
            )
            expect_same(serving, before, "a version that was aborted")
        finally:
            self.connect(serving, weights(0))
            for other in others:
                other.close()
        later = serving.serve(weights(2))
        expect_greedy(
            serving.greedy(), PROMPT, {later: reference(2)}, "the completion after a version that was aborted"
        )

    def test_a_rollback_that_comes_too_late_changes_nothing(self, serving: Serving, weights: Weights) -> None:
        """Once a version counts, the one before is no longer kept: an error, and the version serves on, bit for bit."""
        old = serving.serve(weights(1))
        new = serving.serve(weights(2))
        before = answer(serving)
        for version in (new, old):
            what = f"the rollback of version {version}"
            serving.run(failure_of(serving.replica.rollback(version), CommitError, what), what)
            expect_same(serving, before, what)

    def test_a_quarantined_replica_serves_again_after_the_next_version(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Until then requests in flight and new ones fail by `QuarantinedError`, and so does a commit that cannot begin."""
        version = serving.serve(weights(1))

        async def quarantined() -> None:
            replica = serving.replica
            in_flight = [asyncio.create_task(replica.generate("r", PROMPT, 384, greedy=True)) for _ in range(2)]
            await serving.tokens(2, in_flight)
            await replica.quarantine(QuarantinedError("this check has quarantined it.", part="conformance"))
            for task in in_flight:
                await failure_of(task, QuarantinedError, "a request in flight at a quarantine")
            await failure_of(replica.generate("r", PROMPT, 4), QuarantinedError, "a request to a quarantined replica")
            commit = replica.commit(version + _NEVER_STAGED)
            await failure_of(commit, QuarantinedError, "the failed commit of a quarantined replica")
            await failure_of(replica.generate("r", PROMPT, 4), QuarantinedError, "a request after a failed commit")

        serving.run(quarantined(), "a quarantine")
        later = serving.serve(weights(2))
        expect_greedy(serving.greedy(), PROMPT, {later: reference(2)}, "the completion after a quarantine")


def answer(serving: Serving) -> Completion:
    """A completion that shows the weights to the last bit: greedy, with scores of the prompt and of other tokens."""
    return serving.generate(greedy=True, prompt_logprobs=2, top_logprobs=3)


def expect_same(serving: Serving, before: Completion, what: str) -> None:
    """Check that a replica answers as `before`, with the same versions."""
    now = answer(serving)
    if serving.takes_seeds:
        same, how = now == before, "bit for bit"
    else:
        pairs = zip(_scores(now), _scores(before), strict=False)
        close = all(abs(one - other) <= LOGPROB_LIMIT for one, other in pairs)
        same = close and (now.token_ids, now.versions) == (before.token_ids, before.versions)
        how = f"within {LOGPROB_LIMIT:g}"
    assert same, f"expected the version before to serve {how} after {what}, it answers {now}, not {before}"


def _scores(completion: Completion) -> list[float]:
    """The log-probabilities of the prompt and of the generated tokens."""
    return [score for score in (*(completion.prompt_logprobs or ()), *completion.logprobs) if score is not None]
