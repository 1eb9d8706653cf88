"""Checks of what is generated: tokens, log-probabilities, and where a completion ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import ConfigError

from ...contract.records import Completion
from ...contract.requests import Sampling
from ..models import PROMPT, VOCABULARY, Reference, make_tokenizer
from ..serving import Serving
from .base import MODEL_LEN, RolloutConformanceBase, ServingMaker, Versions, expect_close, expect_greedy

_DRAWS = 192
"""Tokens drawn to compare their frequencies with a distribution of five tokens."""
_FREQUENCY_LIMIT = 0.2
"""Largest share of draws in which frequencies may differ from probabilities: five times what chance makes of `_DRAWS`."""
_SAMPLINGS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "all": {"temperature": 1.8, "top_k": 20, "top_p": 0.6},
}


class DecodingChecks(RolloutConformanceBase):
    """Checks of what is generated."""

    def test_a_started_engine_serves_its_checkpoint_and_then_a_version(
        self, make: ServingMaker, versions: Versions, model: str
    ) -> None:
        """On every model, facts and greedy tokens are those of the checkpoint, and after a commit those of the version's files.

        Tokens exactly, log-probabilities within 1e-4. The model's end-of-sequence token ends nothing.
        """
        serving = make(versions.path(model))
        serving.start()
        engine = serving.replica._engine
        facts = engine.dtype, engine.max_model_len, engine.vocab_size
        wanted = ("float32", MODEL_LEN, VOCABULARY)
        assert facts == wanted, f"expected dtype, max_model_len and vocab_size to be {wanted}, they are {facts}"
        self.connect(serving, versions.tensors(model, 0))
        for seed in range(2):
            version = serving.serve(versions.tensors(model, seed)) if seed else 0
            for prompt in (PROMPT, (3,), range(10, 40)):
                found = serving.greedy(prompt, 12)
                reference = {version: versions.reference(model, seed)}
                expect_greedy(found, prompt, reference, f"the completion of {list(prompt)}")
                expect_end(found, 12, "length", "a request for 12 tokens")

    def test_a_completion_ends_where_it_is_told(self, serving: Serving) -> None:
        """Stop ids and stop strings end it with the token that completes them, of which the answer has all; else its length.

        A completion also ends where prompt and completion are as long as the engine takes.
        """
        tokenizer = make_tokenizer()
        whole = serving.greedy(count=16).token_ids
        ends_at = [token for index, token in enumerate(whole) if token not in whole[:index]][-1]
        absent = next(token for token in range(VOCABULARY) if token not in whole)
        first = whole.index(ends_at) + 1
        expect_end(serving.generate(greedy=True, stop_ids=[absent, ends_at]), first, "stop", f"stop token {ends_at}")
        string = tokenizer.decode(whole[8:10])
        lengths = range(1, len(whole) + 1)
        first = next(length for length in lengths if string in tokenizer.decode(whole[:length]))
        found = serving.generate(greedy=True, stop_strings=["no such text", string])
        expect_end(found, first, "stop", f"stop string {string!r}")
        assert found.token_ids == whole[:first], f"expected {whole[:first]} up to {string!r}, it is {found.token_ids}"
        expect_end(serving.greedy(count=1), 1, "length", "a request for one token")
        longest = [1] * (MODEL_LEN - 3)
        expect_end(serving.greedy(longest, 10), 3, "length", "a request for more tokens than the model takes")

    @pytest.mark.parametrize("options", _SAMPLINGS.values(), ids=_SAMPLINGS)
    def test_sampled_tokens_have_the_log_probability_of_their_distribution(
        self, serving: Serving, weights: Callable[[int], Any], reference: Callable[[int], Reference], options: Any
    ) -> None:
        """With temperature, top_k and top_p applied, within 1e-4; nothing is drawn that they leave out.

        An engine may refuse top_k together with top_p, but neither alone.
        """
        serving.serve(weights(1))
        for seed in range(3):
            try:
                found = serving.generate(count=24, seed=serving.seed(seed), **options)
            except ConfigError as refusal:
                if not {"top_k", "top_p"} <= options.keys():
                    raise
                pytest.skip(f"the replica refuses top_k together with top_p: {refusal}")
            allowed = reference(1).distributions(PROMPT, found.token_ids, Sampling(24, **options))
            wanted = allowed.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
            expect_close(found.logprobs, wanted, f"log-probabilities with {options}")

    def test_tokens_are_drawn_from_the_distribution(
        self, serving: Serving, weights: Callable[[int], Any], reference: Callable[[int], Reference]
    ) -> None:
        """Over many seeds the frequencies of five tokens are their probabilities."""
        serving.serve(weights(1))
        options: dict[str, Any] = {"temperature": 2.0, "top_k": 5}
        seeds = [serving.seed(number) for number in range(_DRAWS)]

        async def draw() -> list[Completion]:
            calls = (serving.replica.generate("draw", PROMPT, 1, seed=seed, **options) for seed in seeds)
            return await asyncio.gather(*calls)

        counts = Counter(completion.token_ids[0] for completion in serving.run(draw(), "completions of one token"))
        (logprobs,) = reference(1).distributions(PROMPT, [0], Sampling(1, **options)).exp()
        frequencies = torch.tensor([counts[token] / _DRAWS for token in range(VOCABULARY)])
        apart = float((frequencies - logprobs).abs().sum() / 2)
        assert apart <= _FREQUENCY_LIMIT, (
            f"expected frequencies within {_FREQUENCY_LIMIT:g} of the probabilities, {apart:.2f} of {_DRAWS} draws differ"
        )

    def test_a_seed_repeats_a_completion(self, serving: Serving) -> None:
        """Alone and beside other requests; another seed gives another completion."""
        if not serving.takes_seeds:
            pytest.skip("the replica, as it is set up here, refuses seeds")
        options: dict[str, Any] = {"temperature": 2.0}

        async def beside() -> list[Completion]:
            seeds = (7, 8, 9, 7)
            calls = (serving.replica.generate("seed", PROMPT, 32, seed=seed, **options) for seed in seeds)
            return await asyncio.gather(*calls)

        alone = serving.generate(count=32, seed=7, **options).token_ids
        first, other, _, again = (each.token_ids for each in serving.run(beside(), "four completions"))
        assert alone == first == again, f"expected seed 7 to give {alone} again, it gave {first} and {again}"
        assert alone != other, f"expected another completion with seed 8, it is {other}, too"

    def test_prompts_and_the_most_probable_tokens_have_log_probabilities(
        self, serving: Serving, weights: Callable[[int], Any], reference: Callable[[int], Reference]
    ) -> None:
        """The prompt's are the model's own; the most probable tokens come in order, without those that cannot be drawn."""
        serving.serve(weights(1))
        prompt, options = list(range(20, 32)), dict[str, Any](temperature=1.5, top_k=2)
        for _ in range(2):  # the second time the prompt may be in a cache
            found = serving.generate(prompt, 6, seed=serving.seed(1), prompt_logprobs=3, top_logprobs=4, **options)
            own = reference(1).logits(prompt)[:-1].log_softmax(-1)
            assert found.prompt_logprobs is not None, "expected log-probabilities of the prompt, there are none"
            assert found.prompt_logprobs[0] is None, "expected None for the first token of the prompt"
            scores = [each for each in found.prompt_logprobs[1:] if each is not None]
            assert len(scores) == len(prompt) - 1, f"expected {len(prompt) - 1} scores of the prompt, got {len(scores)}"
            expect_close(
                scores, own.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], "log-probabilities of the prompt"
            )
            expect_top((found.top_prompt_logprobs or [None])[1:], own, 3, "in the places of the prompt")
            drawn = reference(1).distributions(prompt, found.token_ids, Sampling(6, **options))
            expect_top(found.top_logprobs or [], drawn, 2, "in the places of generated tokens")
        plain = serving.generate(prompt, 2, greedy=True)
        extras = plain.prompt_logprobs, plain.top_prompt_logprobs, plain.top_logprobs
        assert extras == (None, None, None), f"expected nothing that was not asked for, there is {extras}"
        scored = serving.generate(prompt, 2, greedy=True, prompt_logprobs=0)
        assert scored.prompt_logprobs is not None, "expected log-probabilities of the prompt with prompt_logprobs = 0"
        assert scored.top_prompt_logprobs is None, "expected no most probable tokens with prompt_logprobs = 0"


def expect_end(found: Completion, length: int, reason: str, what: str) -> None:
    """Check where and why a completion has ended."""
    end = len(found.token_ids), found.finish_reason
    assert end == (length, reason), f"expected {length} tokens and {reason!r} of {what}, got {end[0]} and {end[1]!r}"


def expect_top(found: Any, wanted: torch.Tensor, count: int, where: str) -> None:
    """Check the `count` most probable tokens in some places: [places, vocabulary] log-probabilities are `wanted`."""
    best = wanted.topk(count)
    tokens = [[token for token, _ in place] for place in found]
    assert tokens == best.indices.tolist(), (
        f"expected {best.indices.tolist()} as the most probable tokens {where}, they are {tokens}"
    )
    scores = [score for place in found for _, score in place]
    expect_close(scores, best.values.flatten(), f"log-probabilities of the most probable tokens {where}")
