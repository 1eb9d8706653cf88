"""Adapters of several ranks in one replica, which requests name by their versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from named_adapters import PREFIX, RANK, SLOTS, VOCAB, Adapter, NamedAdapters, serving
from running_replica import slow_steps
from tiny_models import greedy_tokens, is_greedy

from weightlane.ckpt_engines import ConfigError, QuarantinedError, SyncAbortedError, UntouchedError
from weightlane.rollout import Completion
from weightlane.rollout.config import AdapterConfig
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [(7 * position) % 290 for position in range(50)]
"""More than three blocks of the prefix cache, and the same for all: a cached block of another adapter would show."""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NamedAdapters]:
    with serving(tmp_path_factory.mktemp("adapters")) as made:
        yield made


@pytest.fixture(scope="module")
def adapters(replica: NamedAdapters) -> list[Adapter]:
    """More than there are slots."""
    return [
        replica.make(2, 4.0, ("q_proj", "v_proj", "up_proj")),
        replica.make(4, 6.0),
        replica.make(RANK, 24.0),
        replica.make(1, 3.0, ("down_proj", "gate_proj")),
    ]


async def publish_all(replica: NamedAdapters, adapters: list[Adapter]) -> list[int]:
    versions: list[int] = []
    for adapter in adapters:
        versions.append(await replica.publish(adapter, keep=versions))
    return versions


async def decode_each(replica: NamedAdapters, versions: list[int], count: int) -> list[Completion]:
    """At once, with the model's own weights first."""
    calls = [replica.local.generate("r", PROMPT, count, greedy=True, adapter=each) for each in (0, *versions)]
    return await asyncio.gather(*calls)


def test_while_there_is_no_version_the_weights_alone_serve_those_who_name_them(replica: NamedAdapters) -> None:
    """Before the first version, and after its rollback. The first test of this replica."""

    async def check(loaded: int) -> None:
        generate = replica.local.generate
        alone = await generate("r", PROMPT[:3], 8, greedy=True, adapter=0)
        assert is_greedy(replica.model, PROMPT[:3], alone.token_ids)
        assert alone.versions == [0] * 8
        with pytest.raises(QuarantinedError):
            await generate("r", PROMPT[:3], 8)
        with pytest.raises(ConfigError, match="adapter 1 is not loaded"):
            await generate("r", PROMPT[:3], 8, adapter=1)
        assert not replica.local.stats().serving
        assert len(await replica.loaded()) == loaded, "the next commit drops what was rolled back"

    async def check_twice() -> None:
        await check(0)
        await replica.local.rollback(await replica.publish(replica.make(2, 1.0)))
        await check(1)

    replica.run(check_twice())


def test_adapters_of_several_ranks_are_in_slots_as_vllm_loads_them_and_decode_beside_the_weights_alone(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    """There are more of them than slots: some wait for one."""

    async def decode() -> tuple[list[int], list[Completion]]:
        versions = await publish_all(replica, adapters)
        assert len(await replica.loaded()) >= len(adapters) > SLOTS
        for version, adapter in zip(versions, adapters, strict=True):
            await replica.check_slot(adapter.files, version)
        return versions, await decode_each(replica, versions, 20)

    versions, completions = replica.run(decode())
    models = (replica.model, *(adapter.merged for adapter in adapters))
    for completion, version, model in zip(completions, (0, *versions), models, strict=True):
        assert completion.versions == [version] * 20
        assert is_greedy(model, PROMPT, completion.token_ids), f"version {version}"
    assert len({tuple(completion.token_ids) for completion in completions}) == len(models)


def test_a_version_that_is_not_kept_or_rolled_back_is_dropped_but_for_requests_in_flight(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    async def decode(version: int) -> asyncio.Task[Completion]:
        """A request that has some of its tokens."""
        flying = asyncio.create_task(replica.local.generate("r", PROMPT, 60, greedy=True, adapter=version))
        wanted = replica.local.clock.tokens + 5
        while replica.local.clock.tokens < wanted:  # noqa: ASYNC110 - nothing announces a count
            await asyncio.sleep(0.01)
        return flying

    async def drop() -> Completion:
        first, second = await publish_all(replica, adapters[:2])
        async with slow_steps(replica.local):
            flying = await decode(first)
            third = await replica.publish(adapters[2], keep=[second])
            assert not flying.done()
        for version in (second, third):
            await replica.local.generate("r", PROMPT, 2, adapter=version)
        with pytest.raises(ConfigError, match=f"adapter {first} is not loaded; loaded are {second}, {third}"):
            await replica.local.generate("r", PROMPT, 2, adapter=first)
        ended = await flying
        fourth = await replica.publish(adapters[3], keep=[second])
        assert len(await replica.loaded()) == 3, "the kept one, the newest, and the one before for a rollback"
        async with slow_steps(replica.local):
            flying = await decode(fourth)
            await replica.local.rollback(fourth)
            assert not flying.done()
        assert is_greedy(adapters[3].merged, PROMPT, (await flying).token_ids)
        with pytest.raises(ConfigError, match=f"loaded are {second}, {third}\\."):
            await replica.local.generate("r", PROMPT, 2, adapter=fourth)
        await replica.check_slot(adapters[2].files, third)
        newest = await replica.local.generate("r", PROMPT, 20, greedy=True)
        assert newest.versions == [third] * 20
        assert is_greedy(adapters[2].merged, PROMPT, newest.token_ids)
        return ended

    ended = replica.run(drop())
    assert is_greedy(adapters[0].merged, PROMPT, ended.token_ids)


def test_requests_that_race_with_commits_have_their_adapter_or_a_typed_error_and_never_end_the_engine(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    expected = [greedy_tokens(adapter.merged, PROMPT, 4) for adapter in adapters]
    published: dict[int, int] = {}
    """The adapter of each version."""
    answered = refused = 0

    def enough() -> bool:
        return len(published) >= 12 and min(answered, refused) >= 10

    async def ask(numbers: random.Random) -> None:
        nonlocal answered, refused
        while not enough():
            await asyncio.sleep(0)
            for version in numbers.sample(sorted(published)[-4:], min(2, len(published))):
                try:
                    completion = await replica.local.generate("r", PROMPT, 4, greedy=True, adapter=version)
                except ConfigError:
                    refused += 1
                    continue
                answered += 1
                assert completion.token_ids == expected[published[version]]

    async def race() -> None:
        async with asyncio.TaskGroup() as tasks:
            for seed in range(4):
                tasks.create_task(ask(random.Random(seed)))
            while not enough():
                turn = len(published)
                version = await replica.publish(adapters[turn % 4], keep=list(published)[-1:])
                published[version] = turn % 4

    replica.run(race())


def test_a_wrong_announcement_is_refused_and_leaves_every_version_as_it_was(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    two, four = adapters[0], adapters[1]

    async def announce() -> None:
        version = await replica.publish(four)
        loaded = await replica.loaded()
        for wrong, says in (
            (AdapterConfig(rank=RANK + 1, alpha=1.0), r"rank 9, and versions have 8.*trainer\.lora\.rank"),
            (AdapterConfig(rank=2, alpha=1.0, targets=("lm_head",)), "for 'lm_head', and versions are not"),
        ):
            with pytest.raises(ConfigError, match=says):
                await replica.local.announce(version + 1, wrong)
        with pytest.raises(ConfigError, match=f"announced after version {version} was committed"):
            await replica.local.announce(version, four.config)
        for adapter, wrong in (
            (four, AdapterConfig(rank=3, alpha=6.0)),
            (two, AdapterConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj"))),
        ):
            with pytest.raises(SyncAbortedError, match="is not zero where the announced adapter has nothing") as raised:
                await replica.publish(adapter, announced=wrong)
            assert type(raised.value.reason) is UntouchedError
        assert await replica.loaded() == loaded
        completion = await replica.local.generate("r", PROMPT, 20, greedy=True, adapter=version)
        assert is_greedy(four.merged, PROMPT, completion.token_ids)

    replica.run(announce())


def test_a_rank_that_cannot_take_a_version_leaves_the_one_before_in_service_bit_for_bit(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    one, other = adapters[1:3]

    async def fail() -> None:
        version = await replica.publish(one)
        loaded = await replica.loaded()
        await replica.probe("probe_fail_adapter", 1)
        async with slow_steps(replica.local):
            flying = asyncio.create_task(replica.local.generate("r", PROMPT, 60, greedy=True))
            with pytest.raises(SyncAbortedError, match=r"rollout rank 1.*on purpose") as raised:
                await replica.publish(other)
        assert type(raised.value.reason) is UntouchedError
        assert set(replica.trainer.states.values()) == {ReplicaState.SERVING}
        assert await replica.loaded() == loaded
        await replica.check_slot(one.files, version)
        fresh = await replica.local.generate("fresh", PROMPT, 16, greedy=True)
        for completion in (await flying, fresh):
            assert set(completion.versions) == {version}
            assert is_greedy(one.merged, PROMPT, completion.token_ids)
        await replica.check_slot(other.files, await replica.publish(other))

    replica.run(fail())


@torch.no_grad()
def logits(model: Path, tokens: Sequence[int], adapter: Adapter | None = None) -> torch.Tensor:
    """Compute transformers' logits for each token but the first, in float64, of shape [tokens - 1, vocabulary]."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    if adapter is not None:
        for name, weight in loaded.named_parameters():
            a, b = (adapter.tensors.get(f"{PREFIX}{name.removesuffix('weight')}lora_{each}.weight") for each in "AB")
            if a is not None and b is not None:
                weight.add_(b.double() @ a.double(), alpha=adapter.config.alpha / adapter.config.rank)
    found: torch.Tensor = loaded(torch.tensor([list(tokens)])).logits
    return found[0, :-1]


def check_top(
    found: Sequence[Sequence[tuple[int, float]]], logprobs: torch.Tensor, counts: Sequence[int], within: float
) -> None:
    """The most probable tokens of each row, best first, with their log-probabilities."""
    for top, row, count in zip(found, logprobs, counts, strict=True):
        best = row.topk(count)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(best.values.tolist(), abs=within)


def test_log_probabilities_of_a_prompt_are_those_of_the_model_also_where_its_blocks_are_cached(
    replica: NamedAdapters,
) -> None:
    """Within 1e-5 of float64, with a weak adapter: with the others, logits are so large that float32 itself is less precise."""
    weak = replica.make(4, 1.0)

    async def ask() -> list[Completion]:
        version = await replica.publish(weak)
        await decode_each(replica, [version], 2)  # the whole prompt is in the cache now
        calls = [
            replica.local.generate("r", PROMPT, 3, adapter=each, prompt_logprobs=count, temperature=0.5, top_k=2)
            for each in (version, 0)
            for count in (5, 0)
        ]
        return await asyncio.gather(*calls)

    for number, completion in enumerate(replica.run(ask())):
        expected = logits(replica.model, PROMPT, (weak, None)[number // 2]).log_softmax(-1)
        assert completion.prompt_logprobs is not None
        first, *others = completion.prompt_logprobs
        assert first is None
        of_tokens = [expected[position, token].item() for position, token in enumerate(PROMPT[1:])]
        assert others == pytest.approx(of_tokens, abs=1e-5)
        if number % 2:
            assert completion.top_prompt_logprobs is None
        else:
            assert completion.top_prompt_logprobs is not None
            first, *tops = completion.top_prompt_logprobs
            assert first is None
            check_top([top or [] for top in tops], expected, [5] * len(tops), 1e-5)


def test_tokens_are_drawn_from_the_distribution_whose_log_probabilities_are_given(
    replica: NamedAdapters, adapters: list[Adapter]
) -> None:
    async def draw() -> list[Completion]:
        version = await replica.publish(adapters[0])

        async def one(seed: int) -> Completion:
            return await replica.local.generate(
                "r", PROMPT, 24, temperature=1.6, top_k=12, top_p=0.7, seed=seed, adapter=version, top_logprobs=15
            )

        return [await one(seed) for seed in (5, 6, 5)]

    drawn, other, again = replica.run(draw())
    assert drawn.token_ids == again.token_ids != other.token_ids
    everything = logits(replica.model, [*PROMPT, *drawn.token_ids], adapters[0])[len(PROMPT) - 1 :] / 1.6
    cut = torch.full_like(everything, -torch.inf)
    for row, whole in zip(cut, everything, strict=True):
        best = whole.topk(12)
        shares = best.values.softmax(-1)
        kept = shares.cumsum(-1) - shares < 0.7
        row[best.indices[kept]] = best.values[kept]
    expected = cut.log_softmax(-1)
    assert drawn.logprobs == pytest.approx(
        expected.gather(1, torch.tensor([drawn.token_ids]).T)[:, 0].tolist(), abs=2e-5
    )
    assert drawn.top_logprobs is not None
    counts = (expected > -torch.inf).sum(-1).tolist()
    assert 1 < max(counts) <= 12
    check_top(drawn.top_logprobs, expected, counts, 2e-5)
    assert other.prompt_logprobs is None


def test_a_completion_ends_with_the_token_that_completes_a_stop_string_also_one_of_a_special_token(
    replica: NamedAdapters,
) -> None:
    """The tokenizer's words are ``w0`` to ``w299``, with blanks between them; the last two are special tokens."""
    words = greedy_tokens(replica.model, PROMPT, 30)
    stop = f"w{words[10]} w{words[11]}"
    first = next(count for count in range(31) if stop in " ".join(f"w{word}" for word in words[:count]))

    async def sample(seed: int, **options: Any) -> list[int]:
        call = replica.local.generate("r", PROMPT, 60, temperature=2.0, seed=seed, adapter=0, **options)
        return (await call).token_ids

    async def stop_there() -> Completion:
        token = VOCAB - 2
        drawn = dict(enumerate(await asyncio.gather(*map(sample, range(32)))))
        seed = next(seed for seed, tokens in drawn.items() if token in tokens)
        stopped = await sample(seed, stop_strings=["none", f"w{token}"])
        assert stopped == drawn[seed][: drawn[seed].index(token) + 1]
        return await replica.local.generate("r", PROMPT, 30, greedy=True, adapter=0, stop_strings=[stop])

    completion = replica.run(stop_there())
    assert completion.token_ids == words[:first]
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == first


def test_a_request_that_would_end_the_engine_is_refused_and_others_are_served(replica: NamedAdapters) -> None:
    wrong: list[tuple[list[int], dict[str, Any], str]] = [
        ([5, VOCAB], {}, "token 300, and the model has tokens 0 to 299"),
        ([-1, 5], {}, "token -1"),
        ([5], {"seed": 1 << 63}, "seed"),
        ([5], {"seed": -2}, "seed"),
        ([], {}, "vLLM refused"),
        ([5], {"top_logprobs": 21}, "max allowed: 20"),
        ([5], {"prompt_logprobs": 21}, "max allowed: 20"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"top_k": -2}, "top_k"),
        ([5], {"temperature": 0.001}, "has to be from 0.01 to 2"),
        ([5], {"stop_strings": [""]}, "stop"),
        ([5], {"stop_ids": [VOCAB]}, "stop_ids has token 300"),
        ([5], {"adapter": -1}, "adapter -1 is not loaded"),
        ([5], {"adapter": 1 << 40}, "is not loaded"),
    ]

    async def refuse() -> Completion:
        for prompt, options, says in wrong:
            with pytest.raises(ConfigError, match=says):
                await replica.local.generate("r", prompt, 4, **{"adapter": 0, **options})
        largest: dict[str, Any] = {"top_k": 1 << 40, "seed": (1 << 63) - 1, "top_logprobs": 20, "prompt_logprobs": 20}
        await replica.local.generate("r", PROMPT[:1], 4, adapter=0, **largest)
        return await replica.local.generate("r", PROMPT, 16, greedy=True, adapter=0)

    assert replica.run(refuse()).token_ids == greedy_tokens(replica.model, PROMPT, 16)
