"""Checks of commits: which weights compute each token, before, during and after."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from ...contract.engine import RolloutEngine
from ...contract.records import Completion
from ..models import PROMPT, VOCABULARY
from ..serving import Serving
from .base import References, RolloutConformanceBase, ServingMaker, Versions, Weights, expect_greedy

_LENGTHS = (64, 80, 96)
"""Tokens of requests that a commit should meet in flight: not alike, so that they do not all end at the same step."""
_ATTEMPTS = 3
"""Commits after which one must have come while a request was in flight, and not between two."""
_LONG_PROMPT = tuple(7 * index % VOCABULARY for index in range(300))
"""Longer than the blocks in which engines cache prefixes."""


class CommitChecks(RolloutConformanceBase):
    """Checks of commits."""

    def test_requests_in_flight_switch_models_where_their_stamps_switch(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Tokens before the commit are the old model's; later ones are the new model's over the whole prefix."""
        old, new, found = switches(serving, weights)
        for completion in found:
            expect_greedy(completion, PROMPT, {old: reference(1), new: reference(2)}, "a completion across a commit")

    def test_several_commits_in_a_row_are_each_stamped(
        self, serving: Serving, weights: Weights, reference: References
    ) -> None:
        """Every token of requests across three commits is decoded by the model of its stamp, and versions only grow."""
        first = serving.serve(weights(0))
        seeds = (1, 2, 0)

        async def commits() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                calls = (serving.replica.generate("r", PROMPT, 2 * _LENGTHS[-1], greedy=True) for _ in range(2))
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
        old, new, found = switches(serving, weights)
        for completion in found:
            switch = completion.versions.count(old)
            before = Completion("", completion.token_ids[:switch], completion.logprobs[:switch], [old] * switch, "")
            expect_greedy(before, PROMPT, {old: reference(1)}, "the tokens of a completion before a commit")
        fresh = serving.greedy(_LONG_PROMPT, 4)
        expect_greedy(fresh, _LONG_PROMPT, {new: reference(2)}, "a completion begun after a commit that kept caches")

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
        old, new, found = switches(serving, weights)
        for completion in found:
            expect_greedy(completion, PROMPT, {old: reference(1), new: reference(2)}, "a completion across a commit")

    def test_another_publisher_is_followed(self, serving: Serving, weights: Weights, reference: References) -> None:
        """After ``connect`` to a second publisher the old version serves until a version of the new one is committed."""
        old = serving.serve(weights(1))
        self.connect(serving, weights(0))
        expect_greedy(serving.greedy(), PROMPT, {old: reference(1)}, "the completion after a connect")
        new = serving.serve(weights(2))
        expect_greedy(serving.greedy(), PROMPT, {new: reference(2)}, "the completion of another publisher's version")


def switches(serving: Serving, weights: Weights) -> tuple[int, int, list[Completion]]:
    """Commit seed 2 after seed 1 while requests are in flight. Requests begin once the version is staged.

    Returns the old version, the new one, and the completions that have tokens of both, of which there is one at least.
    """
    for _ in range(_ATTEMPTS):
        old = serving.serve(weights(1))
        new, found = serving.run(_across(serving, weights(2)), "completions across a commit")
        for completion in found:
            switch = completion.versions.count(old)
            stamps = [old] * switch + [new] * (len(completion.token_ids) - switch)
            assert completion.versions == stamps, (
                f"expected tokens of version {old} and then of {new}, their versions are {completion.versions}"
            )
        if across := [completion for completion in found if len(set(completion.versions)) > 1]:
            return old, new, across
    raise AssertionError("expected a commit while requests are in flight, it came between them")


async def _across(serving: Serving, tensors: Mapping[str, torch.Tensor]) -> tuple[int, list[Completion]]:
    """Commit a version while three requests are in flight, however long that takes; a request that ends makes room for the next.

    Returns the version and all completions.
    """
    found: list[Completion] = []
    tasks: list[asyncio.Task[None]] = []
    committed = asyncio.Event()

    async def one_after_the_other(length: int) -> None:
        while not committed.is_set():
            found.append(await serving.replica.generate("r", PROMPT, length, greedy=True))

    async def begin() -> None:
        tasks.extend(asyncio.create_task(one_after_the_other(length)) for length in _LENGTHS)
        await serving.tokens(2 * len(tasks), tasks)

    serving.replica.before_commit = begin
    try:
        report = await serving.sync(tensors)
        committed.set()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return report.version, found
