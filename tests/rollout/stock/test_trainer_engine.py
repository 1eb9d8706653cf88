"""vLLM's factory makes our trainer engine by name; sources and clients are vLLM's, or a user's, and the vLLM is a subscriber."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from json_program import Program, call_all
from patience import PATIENT
from ports import free_port

from weightlane.ckpt_engines import (
    ConfigError,
    ManifestError,
    SyncAbortedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.rollout.commit.remote_failure import RemoteFailureError

if TYPE_CHECKING:
    from sync_clients import DictSource, FakeVLLM

pytestmark = pytest.mark.vllm

ROUND = ["start", "update", "finish"]


def init_info(**more: Any) -> Any:
    from weightlane.rollout.vllm_trainer import WeightlaneTrainerInitInfo

    return WeightlaneTrainerInitInfo(**{"rank": 0, "sync": PATIENT, **more})


def connected(client: Any, source: Any, **more: Any) -> Any:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(init_info(**more), client=client, source=source)


@pytest.fixture
def fakes() -> Iterator[list[FakeVLLM]]:
    from sync_clients import WEIGHTS, FakeVLLM

    made = [FakeVLLM(WEIGHTS) for _ in range(2)]
    yield made
    for fake in made:
        fake.close()


@pytest.fixture
def source() -> DictSource:
    from sync_clients import WEIGHTS, DictSource

    return DictSource({name: tensor.clone() for name, tensor in WEIGHTS.items()})


def test_each_version_of_a_modules_parameters_is_served_when_send_weights_returns(fakes: list[FakeVLLM]) -> None:
    from sync_clients import WEIGHTS, module_of
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

    module, fake = module_of({name: tensor.double() for name, tensor in WEIGHTS.items()}), fakes[0]
    parameter = module.get_parameter("layers.0.w")
    module.get_submodule("layers.1").register_parameter("tied", parameter)
    engine = connected(fake, ModuleSource(module), world_size=2, sync={**PATIENT, "wire_dtype": "float32"})
    assert isinstance(engine, TrainerWeightTransferEngine)
    for value in (1.0, 2.0):
        with torch.no_grad():
            parameter.fill_(value)
        engine.send_weights()
        assert fake.serves({name: tensor.detach().float() for name, tensor in module.named_parameters()})
    assert fake.calls == ["init", *ROUND, *ROUND]
    module.get_submodule("layers.1").tied = torch.nn.Parameter(parameter.detach().clone())
    with pytest.raises(ManifestError, match=r"layers\.1\.tied is in other memory"):
        engine.send_weights()
    module.get_submodule("layers.1").tied = parameter
    parameter.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ManifestError, match=r"layers\.0\.w is in other memory"):
        engine.send_weights()
    engine.shutdown()
    with pytest.raises(WeightlaneError, match="the publisher was closed"):
        engine.send_weights()


def test_a_version_that_is_not_waited_for_is_that_of_the_call_and_its_error_is_raised_by_the_next_call(
    fakes: list[FakeVLLM], source: DictSource
) -> None:
    from sync_clients import WEIGHTS

    engine = connected(fakes[0], source)
    engine.send_weights(wait=False)
    engine.fence()
    source.tensors["layers.0.w"].fill_(3)
    engine.wait()
    assert fakes[0].serves(WEIGHTS)
    fakes[0].fails["update"] = RuntimeError("not now")
    engine.send_weights(wait=False)
    with pytest.raises(SyncAbortedError, match="not now"):
        engine.send_weights(wait=False)
    fakes[0].fails.clear()
    engine.send_weights(wait=False)
    engine.shutdown()
    assert fakes[0].serves(source.tensors)


def test_a_source_that_fails_in_the_middle_sends_nothing(
    fakes: list[FakeVLLM], source: DictSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sync_clients import FULL_PASS, WEIGHTS

    engine = connected(fakes[0], source)
    engine.send_weights()
    source.tensors["embed.weight"].fill_(7)
    good = list(WEIGHTS.items())
    for yields, error in (
        ([good[0], ("", OSError("no shard"))], "unexpected OSError: no shard"),
        (good[:2], r"it ends before layers\.1\.w"),
        ([*good, ("more", torch.ones(1))], "it yields more, and nothing more was declared"),
        (good[::-1], r"it yields layers\.1\.w, and embed\.weight was declared"),
        ([(good[0][0], torch.ones(2))], r"declared float32 \[5, 2\], and is float32 \[2\]"),
        ([(good[0][0], good[0][1].half())], r"and is float16 \[5, 2\]"),
    ):

        def broken(_: object, yields: Any = yields) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in yields:
                if isinstance(tensor, Exception):
                    raise tensor
                yield name, tensor

        monkeypatch.setattr(type(source), FULL_PASS, broken)
        with pytest.raises(WeightlaneError, match=error):
            engine.send_weights()
        monkeypatch.undo()
        assert fakes[0].calls == ["init", *ROUND]
        assert fakes[0].serves(WEIGHTS)
    engine.send_weights()
    assert fakes[0].serves(source.tensors)
    engine.shutdown()


def marked(*, intact: bool) -> RemoteFailureError:
    return RemoteFailureError(WeightlaneError("a rank failed"), intact=intact)


def test_a_client_that_fails_leaves_every_vllm_with_the_version_before(
    fakes: list[FakeVLLM], source: DictSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sync_clients import WEIGHTS

    actor_died = type("ActorDiedError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayActorError=actor_died))
    engine = connected(fakes, source)
    engine.send_weights()
    assert all(fake.serves(WEIGHTS) for fake in fakes)
    source.tensors["embed.weight"].fill_(7)
    for call, cause, error in (
        ("start", ConnectionError("refused"), WorkerDiedError),
        ("update", actor_died("it is dead"), WorkerDiedError),
        ("update", RuntimeError("vLLM says no"), UntouchedError),
        ("finish", marked(intact=True), UntouchedError),
    ):
        fakes[1].fails = {call: cause}
        with pytest.raises(SyncAbortedError, match=f"{error.__name__}.*{str(cause)[:13]}"):
            engine.send_weights()
        assert all(fake.serves(WEIGHTS) for fake in fakes), "what had the new version was rolled back"
    fakes[1].fails = {}
    engine.send_weights()
    assert all(fake.serves(source.tensors) for fake in fakes)
    fakes[1].fails = {"finish": marked(intact=False)}
    with pytest.raises(SyncAbortedError, match=r"cannot be trusted.*a rank failed"):
        engine.send_weights()
    engine.shutdown()


def test_what_does_not_fit_is_refused_when_the_engine_is_made(fakes: list[FakeVLLM], source: DictSource) -> None:
    from sync_clients import WEIGHTS, DictSource, Slices
    from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient

    from weightlane.rollout.vllm_trainer.client_replica import replicas_behind

    assert [each.name for each in replicas_behind(RayVLLMWeightSyncClient(["a", "b"]))] == ["vllm-0", "vllm-1"]
    unknown = DictSource({**WEIGHTS, "layers.2.w": torch.ones(1)})
    bad_held = DictSource(WEIGHTS, held=[{"nobody.w"}])
    bad_held.owned_names = lambda _: ["nobody.w"]
    silent = Slices(WEIGHTS)
    silent.implements_iter_local = lambda: False
    fakes[1].fails["init"] = ConnectionError("nobody listens")
    for client, given, more, kind, error in (
        (fakes[0], None, {}, ConfigError, "there is no source"),
        (fakes[0], source, {"rank": 1}, ConfigError, "this is rank 1 by its init info, and 0 of 1"),
        (fakes[0], source, {"sync": {"speed": 9}}, ConfigError, "speed: Extra inputs"),
        (fakes[0], source, {"world_size": 3}, ConfigError, "world_size is 3, and 1 ranks of vLLM have connected"),
        (fakes[0], source, {"engine": "pigeon"}, WeightlaneError, "pigeon"),
        (fakes[0], unknown, {}, ManifestError, "unexpected layers.2.w"),
        (fakes[0], bad_held, {}, ManifestError, "nobody.w"),
        (fakes[0], silent, {}, ConfigError, "neither iter_full nor iter_local"),
        (fakes[1], source, {}, WorkerDiedError, "nobody listens"),
    ):
        with pytest.raises(kind, match=error):
            connected(client, given, **more)


def test_the_slices_of_a_mesh_are_those_of_torch_chunk() -> None:
    from weightlane.rollout.vllm_trainer.source_streams import slice_of

    def split(tensor: torch.Tensor, parts: int, dim: int | None, place: int) -> torch.Tensor:
        if dim is None:
            return tensor
        found = torch.chunk(tensor, parts, dim)
        return found[place] if place < len(found) else tensor.narrow(dim, 0, 0)

    tensor, owners = torch.arange(7 * 5).view(7, 5), (4, 2, 9, 0, 1, 3)
    for dims in itertools.product((None, 0, 1), repeat=2):
        placements = [SimpleNamespace() if dim is None else SimpleNamespace(dim=dim) for dim in dims]
        meta = SimpleNamespace(shape=(7, 5), owners=owners, mesh_shape=(3, 2), placements=placements)
        for place, rank in enumerate(owners):
            expected = split(split(tensor, 3, dims[0], place // 2), 2, dims[1], place % 2)
            assert torch.equal(tensor[slice_of(meta, rank).index], expected), (dims, rank)


def test_ranks_that_hold_parts_publish_them_and_gather_nothing() -> None:
    port = free_port()
    ranks = [Program(Path(__file__).with_name("source_rank.py"), str(rank), str(port)) for rank in range(2)]
    try:
        for kind in ("sharded module", "held names", "owned tensors", "slices", "gathered"):
            assert all(call_all(ranks, "publish", kind)), kind
        assert call_all(ranks, "failing") == ["unexpected ValueError: rank 1 has no such expert"] * 2
    finally:
        for rank in ranks:
            rank.kill()
