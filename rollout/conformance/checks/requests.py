"""Checks of requests beside each other: many at once, and some that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ...contract.records import Completion
from ..models import PROMPT, VOCABULARY, Reference
from ..serving import Serving
from .base import MODEL_LEN, SEATS, RolloutConformanceBase, ServingMaker, Versions, expect_greedy, failure_of

_REFUSED: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "a token beyond the vocabulary": ([5, VOCABULARY], 4, {}),
    "a negative token": ([-1], 4, {}),
    "a stop token beyond the vocabulary": (PROMPT, 4, {"stop_ids": [VOCABULARY]}),
    "no prompt": ([], 4, {}),
    "a prompt that is too long": ([5] * MODEL_LEN, 4, {}),
    "no token to generate": (PROMPT, 0, {}),
    "top_p 0": (PROMPT, 4, {"top_p": 0.0}),
    "top_p 1.5": (PROMPT, 4, {"top_p": 1.5}),
    "temperature 0": (PROMPT, 4, {"temperature": 0.0}),
    "a negative seed": (PROMPT, 4, {"seed": -1}),
}
"""Prompt, length and options of bad requests."""


class RequestChecks(RolloutConformanceBase):
    """Checks of requests beside each other."""

    def test_many_requests_at_once_are_decoded_as_each_alone(
        self, serving: Serving, weights: Callable[[int], Any], reference: Callable[[int], Reference]
    ) -> None:
        """More than fit into a step, of several lengths; each gets its own answer."""
        version = serving.serve(weights(1))
        prompts = [[(3 * index + step) % VOCABULARY for step in range(1 + index % 7)] for index in range(3 * SEATS)]

        async def together() -> list[Completion]:
            calls = (
                serving.replica.generate(f"request-{index}", prompt, 4 + index % 5, greedy=True)
                for index, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*calls)

        for index, found in enumerate(serving.run(together(), "many completions")):
            what = f"request {index} of {len(prompts)}"
            assert found.request_id == f"request-{index}", f"expected the answer to {what}, it is to {found.request_id}"
            assert len(found.token_ids) == 4 + index % 5, f"expected {4 + index % 5} tokens of {what}"
            expect_greedy(found, prompts[index], {version: reference(1)}, what)

    def test_a_bad_request_is_refused_and_ends_nothing_else(
        self, serving: Serving, weights: Callable[[int], Any], reference: Callable[[int], Reference]
    ) -> None:
        """It is a `ConfigError`, while other requests are in flight, which continue."""
        version = serving.serve(weights(1))

        async def beside() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                good = [group.create_task(serving.replica.generate("r", PROMPT, 48, greedy=True)) for _ in range(2)]
                await serving.tokens(2, good)
                for what, (prompt, count, options) in _REFUSED.items():
                    await failure_of(serving.replica.generate("bad", prompt, count, **options), ConfigError, what)
            return [each.result() for each in good]

        for found in serving.run(beside(), "completions beside requests that are refused"):
            expect_greedy(found, PROMPT, {version: reference(1)}, "a completion beside requests that are refused")
        assert serving.healthy, "expected the replica to serve on after requests that it refused"

    def test_stop_strings_without_a_tokenizer_are_refused(self, make: ServingMaker, versions: Versions) -> None:
        """A `ConfigError`, where the checkpoint has no tokenizer; requests without stop strings are served."""
        serving = make(versions.path(self.models[0], tokenizer=False))
        serving.start()
        wanted = failure_of(
            serving.replica.generate("r", PROMPT, 4, stop_strings=["w05"]), ConfigError, "a request with stop strings"
        )
        serving.run(wanted, "a request with stop strings")
        assert serving.greedy().finish_reason == "length", "expected a request without stop strings to be served"
