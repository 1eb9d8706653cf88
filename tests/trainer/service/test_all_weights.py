"""A service whose models are all weights: the numbers of plain torch, and many models in turns. See `test_sampling`, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from float64_reference import sequences
from service_process import SDK, ServiceProcess, datums
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine

pytestmark = pytest.mark.skipif(not SDK.is_dir(), reason="the tinker SDK is not installed: make setup installs it")

ADAM = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.5}


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("service") / "files"
    with ServiceProcess(model, directory, trains="all_weights", save_every=2) as running:
        yield running


def created(client: Any) -> Any:
    return client.create_lora_training_client("tiny", 4).result(HANG_S)


def step(training: Any, seed: int, rate: float = 1e-2) -> tuple[Any, Any]:
    from tinker import types

    passed = training.forward_backward(datums(sequences(seed)), "cross_entropy")
    return passed, training.optim_step(types.AdamParams(learning_rate=rate, **ADAM))


def weights_of(service: ServiceProcess, training: Any, name: str) -> dict[str, torch.Tensor]:
    """The weights of a model, by the names of its checkpoint."""
    state = service.checkpoint(training.save_state(name).result(HANG_S).path)
    exported = service.directory.with_name(name)
    Fsdp2Engine.export_saved(state, service.model, exported, torch.float32)
    return load_tensors(exported)


def test_all_weights_are_stepped_as_plain_torch_steps_them(service: ServiceProcess, model: Path) -> None:
    """torch's AdamW over transformers, in float64."""
    training, rate = created(service.client()), 1e-2
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    (answer, _), *_ = [step(training, seed, rate) for seed in (1, 2, 3)]
    logprobs = torch.cat([each["logprobs"].to_torch() for each in answer.result(HANG_S).loss_fn_outputs])
    found, begun = weights_of(service, training, "three"), load_tensors(model)

    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    betas = ADAM["beta1"], ADAM["beta2"]
    optimizer = torch.optim.AdamW(plain.parameters(), rate, betas, ADAM["eps"], ADAM["weight_decay"])
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        chosen, weights = [], []
        for tokens, each in sequences(seed):
            logs = torch.log_softmax(plain(torch.tensor([tokens[:-1]])).logits[0], -1)
            chosen.append(logs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
            weights.append(torch.tensor(each, dtype=torch.float64))
        if seed == 1:
            assert (logprobs - torch.cat(chosen)).abs().max() < 1e-5
        torch.autograd.backward(-(torch.cat(chosen) * torch.cat(weights)).sum())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
    exact = {name: each.detach() for name, each in plain.named_parameters()}
    assert found.keys() <= exact.keys()
    moved = torch.cat([(exact[name] - begun[name]).flatten() for name in found])
    off = torch.cat([(exact[name] - found[name]).flatten() for name in found])
    assert moved.norm() > 0.1
    assert off.norm() / moved.norm() < 1e-5


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # load_state, which older programs call
def test_models_take_turns_on_the_ranks_and_end_as_alone_also_when_the_service_is_killed(
    service: ServiceProcess, model: Path
) -> None:
    alice, bob = service.client("alice"), service.client("bob")

    def take(training: Any, *seeds: int) -> Any:
        for seed in seeds:
            stepped = step(training, seed)[1]
        return stepped

    alone = created(alice)
    take(alone, 10, 11, 12, 13)
    expected = weights_of(service, alone, "alone")

    def ends_as_alone(training: Any, name: str) -> bool:
        found = weights_of(service, training, name)
        return all(torch.equal(found[key], each) for key, each in expected.items())

    one, two = created(alice), created(bob)
    for seed in (10, 11):
        pending = [step(one, seed), step(two, seed + 90, 3e-3)]
    for passed, stepped in pending:
        passed.result(HANG_S), stepped.result(HANG_S)
    half = one.save_state("half").result(HANG_S).path
    take(one, 12).result(HANG_S)
    two.forward_backward(datums(sequences(0)), "cross_entropy").result(HANG_S)
    service.kill()
    service.start()
    stepped = take(two, 1)
    take(one, 13)
    other, norm = weights_of(service, two, "other"), "model.norm.weight"
    assert not torch.equal(other[norm], load_tensors(model)[norm])
    stepped.result(HANG_S)
    assert ends_as_alone(one, "together")

    resumed = alice.create_training_client_from_state_with_optimizer(half).result(HANG_S)
    take(resumed, 12, 13)
    assert ends_as_alone(resumed, "resumed")
    resumed.forward_backward(datums(sequences(7)), "cross_entropy").result(HANG_S)
    broken = resumed.save_state("broken").result(HANG_S).path
    largest = max(service.checkpoint(broken).iterdir(), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(Exception, match="could not be read"):
        resumed.load_state_with_optimizer(broken).result(HANG_S)
    with pytest.raises(Exception, match="other weights were loaded, or should have been"):
        take(resumed, 8).result(HANG_S)
    assert ends_as_alone(resumed, "unchanged"), "of a state that is read half"
    resumed.load_state_with_optimizer(half).result(HANG_S)
    take(resumed, 12, 13)
    assert ends_as_alone(resumed, "loaded")
    without_optimizer = alice.create_training_client_from_state(half).result(HANG_S)
    take(without_optimizer, 12, 13)
    assert not ends_as_alone(without_optimizer, "anew"), "moments were to be dropped"
