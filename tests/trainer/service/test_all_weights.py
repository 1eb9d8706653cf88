"""A service whose models are all weights: the numbers of plain torch, many models in turns, and samplers that keep theirs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from float64_reference import sequences
from service_process import SDK, ServiceProcess, datums
from service_process import TOKENS as TOKENS_OF
from tiny_models import greedy_tokens, load_tensors
from waiting import HANG_S

from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine

pytestmark = pytest.mark.skipif(not SDK.is_dir(), reason="the tinker SDK is not installed: make setup installs it")

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.5}
PROMPT, TOKENS, MANY = [5, 17, 200, 33, 9], 8, 50


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("service") / "files"
    with ServiceProcess(model, directory, trains="all_weights", save_every=2, gap_timeout_s=2) as running:
        yield running


def created(client: Any) -> Any:
    return client.create_lora_training_client("tiny", 4).result(HANG_S)


def step(training: Any, seed: int, rate: float = 1e-2) -> tuple[Any, Any]:
    from tinker import types

    passed = training.forward_backward(datums(sequences(seed)), "cross_entropy")
    return passed, training.optim_step(types.AdamParams(learning_rate=rate, **ADAM))


def directory_of(service: ServiceProcess, path: str) -> Path:
    (found,) = service.directory.glob(f"checkpoints/{path.removeprefix('tinker://').replace(':', '.')}~*")
    return found


def weights_of(service: ServiceProcess, training: Any, name: str) -> dict[str, torch.Tensor]:
    """The weights of a model, by the names of its checkpoint."""
    state = directory_of(service, training.save_state(name).result(HANG_S).path)
    exported = service.directory.with_name(name)
    Fsdp2Engine.export_saved(state, service.model, exported, torch.float32)
    return load_tensors(exported)


def by_plain_torch(model: Path, seeds: list[int], rate: float) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after steps of torch's AdamW in float64, by the names of a checkpoint; log-probabilities before them."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    optimizer = torch.optim.AdamW(
        plain.parameters(), rate, (ADAM["beta1"], ADAM["beta2"]), ADAM["eps"], ADAM["weight_decay"]
    )
    first: list[float] = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for tokens, weights in sequences(seed):
            logs = torch.log_softmax(plain(torch.tensor([tokens[:-1]])).logits[0], -1)
            chosen = logs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            first += chosen.tolist() if seed == seeds[0] else []
            loss = loss - (chosen * torch.tensor(weights, dtype=torch.float64)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
    return {name: each.detach() for name, each in plain.named_parameters()}, first


def test_all_weights_are_stepped_as_plain_torch_steps_them(service: ServiceProcess, model: Path) -> None:
    training = created(service.client())
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    answers = [step(training, seed) for seed in (1, 2, 3)]
    logprobs = [
        value for each in answers[0][0].result(HANG_S).loss_fn_outputs for value in each["logprobs"].to_numpy().tolist()
    ]
    found, begun = weights_of(service, training, "three"), load_tensors(model)
    exact, expected = by_plain_torch(model, [1, 2, 3], 1e-2)
    assert max(abs(one - other) for one, other in zip(logprobs, expected, strict=True)) < 1e-5
    assert found.keys() <= exact.keys()
    moved = torch.cat([(exact[name] - begun[name]).flatten() for name in found])
    off = torch.cat([(exact[name] - found[name]).flatten() for name in found])
    assert moved.norm() > 0.1
    assert off.norm() / moved.norm() < 1e-5
    with httpx.Client(base_url=f"{service.url}/api/v1/", headers={"X-API-Key": TOKENS_OF["alice"]}) as web:
        link = web.get(f"training_runs/{training.model_id}/checkpoints/weights/three/archive", follow_redirects=True)
    (state,) = service.directory.glob("checkpoints/*/weights/three~*")
    with tarfile.open(fileobj=io.BytesIO(link.content)) as archive:
        packed = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]
    assert packed == {file.name: file.read_bytes() for file in state.iterdir()}


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state, which older programs call
def test_models_take_turns_on_the_ranks_and_end_as_alone_also_when_the_service_is_killed(
    service: ServiceProcess, model: Path
) -> None:
    alice, bob = service.client("alice"), service.client("bob")
    alone = created(alice)
    for seed in (10, 11, 12, 13):
        step(alone, seed)
    expected = weights_of(service, alone, "alone")
    base = load_tensors(model)
    one, two = created(alice), created(bob)
    for seed in (10, 11):
        pending = [step(one, seed), step(two, seed + 90, 3e-3)]
    for passed, stepped in pending:
        passed.result(HANG_S), stepped.result(HANG_S)
    path = one.save_state("half").result(HANG_S).path
    step(one, 12)[1].result(HANG_S)
    half = two.forward_backward(datums(sequences(0)), "cross_entropy")
    half.result(HANG_S)
    service.kill()
    service.start()
    stepped = step(two, 1)[1]
    step(one, 13)
    assert not torch.equal(weights_of(service, two, "other")["model.norm.weight"], base["model.norm.weight"])
    stepped.result(HANG_S)
    found = weights_of(service, one, "together")
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    with_optimizer = alice.create_training_client_from_state_with_optimizer(path).result(HANG_S)
    for seed in (12, 13):
        step(with_optimizer, seed)
    found = weights_of(service, with_optimizer, "resumed")
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    with_optimizer.forward_backward(datums(sequences(7)), "cross_entropy").result(HANG_S)
    broken = with_optimizer.save_state("broken").result(HANG_S).path
    largest = max(directory_of(service, broken).iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(Exception, match="could not be read"):
        with_optimizer.load_state_with_optimizer(broken).result(HANG_S)
    with pytest.raises(Exception, match="other weights were loaded, or should have been"):
        step(with_optimizer, 8)[1].result(HANG_S)
    found = weights_of(service, with_optimizer, "unchanged")
    assert all(torch.equal(found[name], each) for name, each in expected.items()), "of a state that is read half"
    with_optimizer.load_state_with_optimizer(path).result(HANG_S)
    for seed in (12, 13):
        step(with_optimizer, seed)
    found = weights_of(service, with_optimizer, "loaded")
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    without = alice.create_training_client_from_state(path).result(HANG_S)
    for seed in (12, 13):
        step(without, seed)
    found = weights_of(service, without, "anew")
    assert any(not torch.equal(found[name], each) for name, each in expected.items()), "moments were to be dropped"


def learn(training: Any, token: int, steps: int) -> None:
    """Train a model to answer with one token."""
    from tinker import types

    data = datums([([*PROMPT, *[token] * TOKENS], [0.0] * (len(PROMPT) - 1) + [1.0] * TOKENS)])
    for _ in range(steps):
        training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=5e-3))
    stepped.result(HANG_S)


def asked(sampler: Any, tokens: int = TOKENS) -> Any:
    from tinker import types

    params = types.SamplingParams(max_tokens=tokens, temperature=0.0, stop=[])
    return sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params)


def sampled(sampler: Any) -> list[int]:
    return list(asked(sampler).result(HANG_S).sequences[0].tokens)


@pytest.mark.vllm
@pytest.mark.slow
def test_samplers_keep_their_version_though_replicas_have_one_at_a_time(model: Path, tmp_path: Path) -> None:
    replica = {"max_model_len": 64, "kv_cache_memory_bytes": 64 << 20}
    directory = tmp_path / "files"
    with ServiceProcess(model, directory, trains="all_weights", save_every=2, replica=replica) as service:
        alice, bob = service.client("alice"), service.client("bob")
        samplers = {"base": alice.create_sampling_client(base_model="tiny").result(HANG_S)}
        expected = {"base": greedy_tokens(model, PROMPT, TOKENS)}
        one, two = created(alice), created(bob)
        for name, training, token in (("first", one, 100), ("other", two, 250), ("second", one, 30)):
            learn(training, token, 6)
            path = training.save_weights_for_sampler(name).result(HANG_S).path
            client = alice if training is one else bob
            samplers[name] = client.create_sampling_client(model_path=path).result(HANG_S)
            expected[name] = greedy_tokens(directory_of(service, path), PROMPT, TOKENS)
            if name == "first":
                moving = training.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
                assert sampled(moving) == expected["first"]
                long = greedy_tokens(directory_of(service, path), PROMPT, MANY)
        one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
        samplers["moving"], expected["moving"] = moving, expected["second"]
        assert len({tuple(each) for each in expected.values()}) == 4, "every version says something else"
        running = [asked(samplers["first"], MANY) for _ in range(3)]  # each with its version to its last token
        others = {name: asked(each) for name, each in samplers.items()}
        assert {name: list(each.result(HANG_S).sequences[0].tokens) for name, each in others.items()} == expected
        assert [list(each.result(HANG_S).sequences[0].tokens) for each in running] == [long] * 3

        service.kill()
        service.start()
        assert {name: sampled(each) for name, each in samplers.items()} == expected
        learn(one, 77, 6)
        path = one.save_weights_for_sampler("third").result(HANG_S).path
        one.save_weights_and_get_sampling_client(kind="inflight").result(HANG_S)
        expected["moving"] = greedy_tokens(directory_of(service, path), PROMPT, TOKENS)
        assert {name: sampled(each) for name, each in samplers.items()} == expected
