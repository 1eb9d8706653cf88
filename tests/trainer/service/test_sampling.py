"""The public SDK samples through the service: each sampler computes with exactly its version, whatever happens beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from service_process import SDK, ServiceProcess, datums
from tiny_models import copy_with, greedy_tokens, load_tensors
from waiting import HANG_S

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not SDK.is_dir(), reason="the tinker SDK is not installed: make setup installs it"),
]

ALPHA, TOKENS, MANY = 32.0, 8, 50
PROMPT = [5, 17, 200, 33, 9]


def learn(training: Any, token: int, steps: int, rate: float) -> None:
    """Train a model to answer with one token."""
    from tinker import types

    data = datums([([*PROMPT, *[token] * TOKENS], [0.0] * (len(PROMPT) - 1) + [1.0] * TOKENS)])
    for _ in range(steps):
        training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=rate))
    stepped.result(HANG_S)


def asked(sampler: Any, tokens: int = TOKENS) -> Any:
    """The future of a greedy completion."""
    from tinker import types

    params = types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params)


def completion(future: Any) -> list[int]:
    return list(future.result(HANG_S).sequences[0].tokens)


def as_model(service: ServiceProcess, path: str, copy: Path) -> Path:
    """The model that a checkpoint is: itself, or, if it has an adapter, a copy with B A added to the weights."""
    found = service.checkpoint(path)
    if not (found / "adapter_model.safetensors").is_file():
        return found
    adapter, weights = load_file(found / "adapter_model.safetensors"), load_tensors(service.model)
    for key in [key for key in adapter if ".lora_A." in key]:
        target = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
        a, b = adapter[key], adapter[key.replace("lora_A", "lora_B")]
        weights[target] = weights[target] + ALPHA / len(a) * b @ a
    return copy_with(weights, service.model, copy)


def assert_tokens_are_scored_as_transformers_does(sampler: Any, model: Path) -> None:
    from tinker import types

    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=3, seed=5)
    answer = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(HANG_S)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = torch.log_softmax(plain(torch.tensor([PROMPT])).logits[0], -1)
    found = answer.prompt_logprobs
    assert found[0] is None
    assert max(abs(found[at + 1] - float(exact[at, token])) for at, token in enumerate(PROMPT[1:])) < 1e-5
    assert [token for token, _ in answer.topk_prompt_logprobs[1]] == exact[0].topk(2).indices.tolist()
    again = sampler.sample(prompt, 2, params).result(HANG_S)
    assert [each.tokens for each in again.sequences] == [each.tokens for each in answer.sequences]
    assert len({each.sequence_id for each in answer.sequences}) == 2


@pytest.mark.parametrize(
    ("trains", "rate", "more_steps", "slots"),
    [
        pytest.param("adapters", 3e-2, 12, {"adapter_slots": 2}, id="adapters"),
        pytest.param("all_weights", 5e-3, 6, {}, id="all weights", marks=pytest.mark.exhaustive),
    ],
)
def test_samplers_keep_their_version_or_move_on_also_when_the_service_is_killed(
    trains: str, rate: float, more_steps: int, slots: dict[str, int], model: Path, tmp_path: Path
) -> None:
    replica = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, **slots}
    with ServiceProcess(model, tmp_path / "files", trains=trains, save_every=2, replica=replica) as service:
        alice, bob = service.client("alice"), service.client("bob")
        one = alice.create_lora_training_client("tiny", 4, 1).result(HANG_S)
        two = bob.create_lora_training_client("tiny", 8, 2).result(HANG_S)
        samplers = {"base": alice.create_sampling_client(base_model="tiny").result(HANG_S)}
        expected = {"base": greedy_tokens(model, PROMPT, TOKENS)}
        for name, client, training, token, steps in (
            ("first", alice, one, 100, 6),
            ("other", bob, two, 250, 6),
            ("second", alice, one, 30, more_steps),
        ):
            learn(training, token, steps, rate)
            path = training.save_weights_for_sampler(name).result(HANG_S).path
            samplers[name] = client.create_sampling_client(model_path=path).result(HANG_S)
            version = as_model(service, path, tmp_path / name)
            expected[name] = greedy_tokens(version, PROMPT, TOKENS)
            if name == "first":
                first, long = version, greedy_tokens(version, PROMPT, MANY)
                samplers["moving"] = one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
                assert completion(asked(samplers["moving"])) == expected["first"]
            if name == "other":
                samplers["unnamed"] = two.save_weights_and_get_sampling_client().result(HANG_S)
                expected["unnamed"] = expected["other"]
                with pytest.raises(Exception, match="no checkpoint"):
                    alice.create_sampling_client(model_path=path).result(HANG_S)
        one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
        expected["moving"] = expected["second"]
        assert len({tuple(each) for each in expected.values()}) == 4, "every version says something else"
        running = [asked(samplers["first"], MANY) for _ in range(3)]  # each with its version to its last token
        others = {name: asked(each) for name, each in samplers.items()}
        assert {name: completion(each) for name, each in others.items()} == expected
        assert [completion(each) for each in running] == [long] * 3
        assert_tokens_are_scored_as_transformers_does(samplers["first"], first)

        service.kill()
        service.start()
        assert {name: completion(asked(each)) for name, each in samplers.items()} == expected
        learn(one, 77, 6, rate)
        path = one.save_weights_for_sampler("third").result(HANG_S).path
        one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
        expected["moving"] = greedy_tokens(as_model(service, path, tmp_path / "third"), PROMPT, TOKENS)
        assert {name: completion(asked(each)) for name, each in samplers.items()} == expected
