"""Checks of commits: which weights compute each token, before, during and after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import torch

from ...contract.engine import RolloutEngine
from ...contract.records import Completion
from ..models import PROMPT, VOCABULARY
from ..reference import Reference
from ..serving import Serving
from .base import RolloutConformanceBase, ServingMaker, Versions, expect_greedy

_LENGTHS = (96, 192, 384, 768)
"""Tokens of requests that a commit should meet in flight: longer ones are tried where an engine is faster than its commit."""
_LONG_PROMPT = tuple(7 * index % VOCABULARY for index in range(300))
"""Longer than the blocks in which engines cache prefixes."""

Weights = Callable[[int], Mapping[str, torch.Tensor]]
References = Callable[[int], Reference]


class CommitChecks(RolloutConformanceBase):
    """Checks of commits."""

    def test_requests_in_flight_switch_models_where_their_stamps_switch(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Tokens before the commit are the old model's; later ones are the new model's over the whole prefix."""
        for old, new, found in switches(serving, weights):
            for completion in found:
                expect_greedy(
                    completion, PROMPT, {old: reference(1), new: reference(2)}, "a completion across a commit"
                )

    def test_several_commits_in_a_row_are_each_stamped(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Every token of requests across three commits is decoded by the model of its stamp, and versions only grow."""
        first = serving.serve(weights(0))
        seeds = (1, 2, 0)

        async def commits() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                calls = (serving.replica.generate("r", PROMPT, _LENGTHS[1], greedy=True) for _ in range(2))
                tasks = [group.create_task(call) for call in calls]
                for seed in seeds:
                    await serving.tokens(4, tasks)
                    await serving.sync(weights(seed))
            return [task.result() for task in tasks]

        by_version = {first + index: reference(seed) for index, seed in enumerate((0, *seeds))}
        for found in serving.run(commits(), "completions across three commits"):
            expect_greedy(found, PROMPT, by_version, "a completion across three commits")
            assert found.versions == sorted(found.versions), f"expected versions that grow, they are {found.versions}"
        expect_greedy(serving.greedy(), PROMPT, {first + 3: reference(0)}, "the completion after three commits")

    def test_no_cache_serves_older_weights(self, serving: Serving, weights: Weights, reference: References) -> None:
        """A long prompt that was computed twice under older weights is computed anew under those that serve."""
        for seed in (1, 2, 1):
            version = serving.serve(weights(seed))
            for _ in range(2):
                found = serving.greedy(_LONG_PROMPT, 4)
                expect_greedy(found, _LONG_PROMPT, {version: reference(seed)}, "the completion of a long prompt")

    def test_caches_are_kept_where_that_is_declared(
        self,
        engine_type: type[RolloutEngine],
        make: ServingMaker,
        versions: Versions,
        weights: Weights,
        reference: References,
    ) -> None:
        """With ``kv_on_commit = "keep"``, requests that begin after a commit are the new model's, and stamps switch as ever."""
        if not engine_type.capabilities.keeps_caches:
            pytest.skip("the engine does not keep caches")
        serving = make(versions.path(self.models[0]), kv_on_commit="keep")
        self.begin(serving, weights(0))
        serving.greedy(_LONG_PROMPT, 4)
        for old, new, found in switches(serving, weights):
            for completion in found:
                switch = completion.versions.count(old)
                before = Completion("", completion.token_ids[:switch], completion.logprobs[:switch], [old] * switch, "")
                expect_greedy(before, PROMPT, {old: reference(1)}, "the tokens of a completion before a commit")
            fresh = serving.greedy(_LONG_PROMPT, 4)
            expect_greedy(
                fresh, _LONG_PROMPT, {new: reference(2)}, "a completion begun after a commit that kept caches"
            )

    def test_commits_are_in_place_where_that_is_declared(
        self,
        engine_type: type[RolloutEngine],
        make: ServingMaker,
        versions: Versions,
        weights: Weights,
        reference: References,
    ) -> None:
        """With ``commit = "in_place"`` no token is computed by half a version."""
        if "in_place" not in engine_type.capabilities.commit_modes:
            pytest.skip("the engine does not commit in place")
        serving = make(versions.path(self.models[0]), commit="in_place")
        self.begin(serving, weights(0))
        for old, new, found in switches(serving, weights):
            for completion in found:
                expect_greedy(
                    completion, PROMPT, {old: reference(1), new: reference(2)}, "a completion across a commit"
                )

    def test_another_publisher_is_followed(self, serving: Serving, weights: Weights, reference: References) -> None:
        """After ``connect`` to a second publisher the old version serves until a version of the new one is committed."""
        old = serving.serve(weights(1))
        self.connect(serving, weights(0))
        expect_greedy(serving.greedy(), PROMPT, {old: reference(1)}, "the completion after a connect")
        new = serving.serve(weights(2))
        expect_greedy(serving.greedy(), PROMPT, {new: reference(2)}, "the completion of another publisher's version")


def switches(serving: Serving, weights: Weights) -> list[tuple[int, int, list[Completion]]]:
    """Commit seed 2 after seed 1 while requests are in flight, until some request has tokens of both.

    Returns the old version, the new one, and the completions, of each attempt. Requests begin once the version is staged.
    """
    attempts: list[tuple[int, int, list[Completion]]] = []
    for length in _LENGTHS:
        old = serving.serve(weights(1))
        new, found = serving.run(_across(serving, weights(2), length), "completions across a commit")
        for completion in found:
            assert len(completion.token_ids) == length, (
                f"expected {length} tokens, there are {len(completion.token_ids)}"
            )
            switch = completion.versions.count(old)
            stamps = [old] * switch + [new] * (length - switch)
            assert completion.versions == stamps, (
                f"expected tokens of version {old} and then of {new}, their versions are {completion.versions}"
            )
        attempts.append((old, new, found))
        if any(0 < completion.versions.count(old) < length for completion in found):
            return attempts
    raise AssertionError(f"expected a commit within a completion of {_LENGTHS[-1]} tokens, it came after its end")


async def _across(serving: Serving, tensors: Mapping[str, torch.Tensor], length: int) -> tuple[int, list[Completion]]:
    tasks: list[asyncio.Task[Completion]] = []

    async def begin() -> None:
        tasks.extend(asyncio.create_task(serving.replica.generate("r", PROMPT, length, greedy=True)) for _ in range(3))
        await serving.tokens(2 * len(tasks), tasks)

    serving.gate.before_commit = begin
    try:
        report = await serving.sync(tensors)
        return report.version, list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
