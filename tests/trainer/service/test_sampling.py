"""The public SDK samples through the service: each sampler computes with exactly its version, whatever happens beside it."""

from __future__ import annotations

from collections.abc import Iterator
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

VOCAB, ALPHA, TOKENS = 304, 32.0, 8
PROMPT = [5, 17, 200, 33, 9]


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    replica = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20, "adapter_slots": 2}
    directory = tmp_path_factory.mktemp("service") / "files"
    with ServiceProcess(model, directory, save_every=2, replica=replica) as running:
        yield running


def learn(training: Any, token: int, steps: int) -> None:
    """Train an adapter to answer with one token."""
    from tinker import types

    data = datums([([*PROMPT, *[token] * TOKENS], [0.0] * (len(PROMPT) - 1) + [1.0] * TOKENS)])
    for _ in range(steps):
        training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=2e-2))
    stepped.result(HANG_S)


def sampled(sampler: Any) -> list[int]:
    from tinker import types

    params = types.SamplingParams(max_tokens=TOKENS, temperature=0.0, stop=[])
    return list(sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result(HANG_S).sequences[0].tokens)


class Merged:
    """Checkpoints as plain models, with B A added to the weights."""

    def __init__(self, service: ServiceProcess, model: Path, path: Path) -> None:
        self._service, self._model, self._path = service, model, path

    def of(self, name: str, rank: int) -> Path:
        (found,) = self._service.directory.glob(f"checkpoints/*/weights/{name}~*")
        adapter = load_file(found / "adapter_model.safetensors")
        weights = load_tensors(self._model)
        for key in [key for key in adapter if ".lora_A." in key]:
            target = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            weights[target] = weights[target] + ALPHA / rank * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
        return copy_with(weights, self._model, self._path / name)

    def greedy(self, directory: Path) -> list[int]:
        return greedy_tokens(directory, PROMPT, TOKENS)


def test_samplers_keep_their_version_or_move_on_also_when_the_service_is_killed(
    service: ServiceProcess, model: Path, tmp_path: Path
) -> None:
    from tinker import types

    alice, bob = service.client("alice"), service.client("bob")
    base = alice.create_sampling_client(base_model="tiny").result(HANG_S)
    one = alice.create_lora_training_client("tiny", 4, 1).result(HANG_S)
    two = bob.create_lora_training_client("tiny", 8, 2).result(HANG_S)
    merged, expected, samplers = Merged(service, model, tmp_path), {}, {"base": base}
    expected["base"] = merged.greedy(model)
    moving = None
    for name, training, rank, token in (("first", one, 4, 100), ("other", two, 8, 250), ("second", one, 4, 30)):
        learn(training, token, 25 if name == "second" else 6)
        training.save_state(name).result(HANG_S)
        samplers[name] = training.save_weights_and_get_sampling_client().result(HANG_S)
        expected[name] = merged.greedy(merged.of(name, rank))
        if training is one:
            moving = training.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
            samplers.setdefault("moving", moving)  # the one that was made at first
    expected["moving"] = expected["second"]
    path = two.save_weights_for_sampler("named").result(HANG_S).path
    samplers["named"], expected["named"] = bob.create_sampling_client(model_path=path).result(HANG_S), expected["other"]
    assert len({tuple(each) for each in expected.values()}) == 4, "every version says something else"
    assert {name: sampled(each) for name, each in samplers.items()} == expected
    with pytest.raises(Exception, match="no checkpoint"):
        alice.create_sampling_client(model_path=path).result(HANG_S)

    prompt = types.ModelInput.from_ints(PROMPT)
    asked = samplers["first"].sample(
        prompt, 2, types.SamplingParams(max_tokens=3, seed=5), include_prompt_logprobs=True, topk_prompt_logprobs=2
    )
    answer = asked.result(HANG_S)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32).eval()
    with torch.no_grad():
        exact = torch.log_softmax(plain(torch.tensor([PROMPT])).logits[0], -1)
    found = answer.prompt_logprobs
    assert found[0] is None
    assert max(abs(found[at + 1] - float(exact[at, token])) for at, token in enumerate(PROMPT[1:])) < 1e-5
    best = exact[0].topk(2)
    assert [token for token, _ in answer.topk_prompt_logprobs[1]] == best.indices.tolist()
    again = samplers["first"].sample(prompt, 2, types.SamplingParams(max_tokens=3, seed=5)).result(HANG_S)
    assert [each.tokens for each in again.sequences] == [each.tokens for each in answer.sequences]
    assert len({each.sequence_id for each in answer.sequences}) == 2

    service.kill()
    service.start()
    assert {name: sampled(each) for name, each in samplers.items()} == expected
    learn(one, 77, 25)
    one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
    one.save_state("third").result(HANG_S)
    expected["moving"] = merged.greedy(merged.of("third", 4))
    assert {name: sampled(each) for name, each in samplers.items()} == expected
