"""Any vLLM becomes a rollout replica by its own calls: ``weight_transfer_config`` and four calls, nothing of ours around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hub_forms import HUB_FORMS
from json_program import Program
from patience import PATIENT
from publishing import OneRankTrainer, PlainReplica
from tiny_models import (
    add_tokenizer,
    copy_with,
    described,
    greedy_tokens,
    load_tensors,
    make_qwen3,
    make_qwen3_moe,
    vllm_parameters,
)
from waiting import HANG_S
from zoo_kind import make
from zoo_models import KINDS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
PROMPT = [4, 5, 6]
OFFLINE = Path(__file__).with_name("offline_process.py")


@pytest.fixture(scope="module")
def offline() -> Iterator[Program]:
    """`offline_process.py`, without AMX."""
    started = Program(OFFLINE, env=ENVIRONMENT)
    yield started
    started.kill()


def looks(offline: Program) -> list[Any]:
    return [offline.call("parameters"), offline.call("greedy", PROMPT, 12)]


def take_versions(
    offline: Program, trainer: OneRankTrainer, models: Sequence[Path], looks: Callable[[Program], Any] = looks
) -> list[Any]:
    """Let vLLM take each version by its own calls; return its parameters and greedy tokens after each."""
    from sync_clients import OfflineClient

    client, held = OfflineClient(offline), []

    def commit(version: int) -> None:
        client.start_weight_update()
        client.update_weights({"version": version})
        client.finish_weight_update()

    replica = PlainReplica("stock", commit)

    async def life() -> None:
        await trainer.connect([replica])
        for model in models:
            await trainer.sync(model)
            held.append(looks(offline))

    with closing(trainer):
        engine = {"backend": trainer.backend, "options": trainer.options}
        client.init_weight_transfer_engine({"rendezvous": trainer.address, "replica": "stock", **engine})
        asyncio.run(asyncio.wait_for(life(), HANG_S))
    return held


def test_vllms_trainer_factory_sends_versions_to_offline_vllm_which_change_nothing_before_the_last_call(
    offline: Program, tmp_path: Path
) -> None:
    """A mixture of experts over a wire, with a client that a user has written. Calls in a wrong order change nothing."""
    from sync_clients import DictSource, OfflineClient
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from weightlane.rollout.vllm_trainer import WeightlaneTrainerInitInfo

    models = [make_qwen3_moe(tmp_path / f"model{seed}", seed=seed, normalised=False) for seed in range(3)]
    offline.call("start", str(models[0]), "float32", "weightlane")
    client, source, seen = OfflineClient(offline), DictSource(load_tensors(models[0])), [looks(offline)]
    finish = client.finish_weight_update
    client.finish_weight_update = lambda: (seen.append(looks(offline)), finish())  # type: ignore[method-assign]
    for calls, error in (
        ([finish], "without a matching start_weight_update"),
        ([lambda: client.update_weights({"version": 1})], "start_weight_update must be called before"),
        ([client.start_weight_update, lambda: client.update_weights({"version": 1})], "before this rank was connected"),
    ):
        *fine, wrong = calls
        for call in fine:
            call()
        with pytest.raises(RuntimeError, match=error):
            wrong()
    engine = WeightTransferTrainerFactory.trainer_init(
        WeightlaneTrainerInitInfo(rank=0, engine="gloo", sync=PATIENT), client=client, source=source
    )
    assert offline.call("trainer_engine") == type(engine).__name__
    for model in models[1:]:
        source.tensors = load_tensors(model)
        engine.send_weights()
        seen.append(looks(offline))
    client.start_weight_update()
    client.update_weights({"version": 777})
    client.start_weight_update()  # an update that was never finished is dropped
    client.finish_weight_update()
    client.start_weight_update()
    client.update_weights({"version": 777})
    with pytest.raises(RuntimeError, match="version 777 is not staged"):
        finish()
    engine.send_weights()
    assert offline.call("weight_version") == "3"
    for number, (parameters, tokens) in zip([0, 0, 1, 1, 2, 2, 2], seen, strict=True):
        wanted = vllm_parameters(load_tensors(models[number]))
        assert parameters == {name: described(tensor) for name, tensor in wanted.items()}
        assert tokens == greedy_tokens(models[number], PROMPT, 12)
    engine.shutdown()


@torch.no_grad()
def embedding_of(model: Path) -> list[float]:
    """Compute the embedding of `PROMPT` with transformers: the last hidden state, normalised."""
    hidden = transformers.AutoModel.from_pretrained(model, dtype=torch.float32).eval()(torch.tensor([PROMPT]))
    return torch.nn.functional.normalize(hidden.last_hidden_state[0, -1], dim=0).tolist()


def test_an_embedding_model_from_a_hub_gives_the_embeddings_of_each_version(offline: Program, tmp_path: Path) -> None:
    """A full version and a delta, under the trainer's names and with masks that no rank reads, which change as well."""
    form, kind = HUB_FORMS["gpt2"], replace(KINDS["gpt2"], sizes=KINDS["gpt2"].sizes | {"n_embd": 128})
    like = [make(kind, tmp_path / f"plain{seed}", seed=seed, dtype=torch.float32) for seed in range(2)]
    versions = [load_tensors(model) for model in like]
    versions.append({name: tensor.clone() for name, tensor in versions[1].items()})
    for tensor in versions[2].values():
        tensor.view(-1)[1] += 1
    expected = [
        embedding_of(copy_with(version, like[0], tmp_path / f"version{number}"))
        for number, version in enumerate(versions)
    ]
    sent = [
        copy_with(form.with_unread(version), like[0], tmp_path / f"sent{number}")
        for number, version in enumerate(versions)
    ]
    served = copy_with(form.files(versions[0]), like[0], tmp_path / "hub")
    add_tokenizer(served)  # vLLM serves no embeddings without one

    def embedding(offline: Program) -> Any:
        return offline.call("embedding", PROMPT)

    offline.call("start", str(served), "float32", "weightlane", "pooling")
    found = [embedding(offline)]
    trainer = OneRankTrainer(sent[0], "filesystem", {"path": str(tmp_path / "versions")}, codec="delta")
    found += take_versions(offline, trainer, sent[1:], embedding)
    assert trainer.codecs == ["dense", "delta"]
    for number, embedded in enumerate(found):
        assert embedded == pytest.approx(expected[number], abs=1e-5), f"version {number}"
    assert expected[1] != pytest.approx(expected[2], abs=1e-3)


def test_every_token_in_flight_has_the_version_of_its_weights_also_where_vllms_completions_do_not_say_it(
    offline: Program, tmp_path: Path
) -> None:
    """Three commits come in the middle of two requests. The oracle is vLLM 0.32's own field."""
    models = [make_qwen3(tmp_path / f"model{seed}", seed=seed) for seed in range(4)]
    both = offline.call("stamp")
    offline.call("start", str(models[0]), "float32", "weightlane")
    offline.call("begin", [PROMPT, [7, 8]], 9)
    offline.call("steps", 2)

    def step(offline: Program) -> Any:
        return offline.call("steps", 3)

    *_, ended = take_versions(offline, OneRankTrainer(models[0], "shm"), models[1:], step)
    wanted = [["default", 0, 2], ["1", 2, 5], ["2", 5, 8], ["3", 8, 9]]
    assert ended == [[9, wanted, wanted if both else None]] * 2


@pytest.mark.exhaustive
def test_an_engine_that_does_not_use_weightlane_packs_its_layers_and_experts_as_before(
    offline: Program, tmp_path: Path
) -> None:
    model = make_qwen3_moe(tmp_path / "experts", seed=0)
    offline.call("start", str(model), "float32", None)
    parameters, tokens = looks(offline)
    _, shape, _ = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert 0 in shape
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert parameters[name] != described(vllm_parameters(load_tensors(model))[name])
    assert tokens == greedy_tokens(model, PROMPT, 12)
