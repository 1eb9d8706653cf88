"""weightlane as NeMo-RL's checkpoint engine: workers in processes of their own, called as its weight synchronizer does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemo_rl_worker
import pytest
import yaml
from json_program import Program, call_all
from nemo_rl_worker import BACKEND, BUCKET_BYTES, create_checkpoint_engine, facts, weights
from waiting import NEVER_S

from weightlane.ckpt_engines import ClosedError, ConfigError, EngineUnavailableError, UnknownEngineError

README = Path(__file__).resolve().parents[3] / "plugins/packages/weightlane-nemo-rl/README.md"


class Synchronizer:
    """The calls of ``nemo_rl/weight_sync/checkpoint_engine_weight_synchronizer.py`` to two workers of either side."""

    def __init__(self) -> None:
        program = Path(nemo_rl_worker.__file__)
        self.policies, self.rollouts = (
            [Program(program, side, str(rank)) for rank in range(2)] for side in ("policy", "vllm")
        )
        self.workers = [*self.policies, *self.rollouts]

    def create(self, **engine_kwargs: Any) -> None:
        given = {"release_after_refit": False, "bucket_mib": 0.125, "timeout_s": NEVER_S} | engine_kwargs
        call_all(self.workers, "init_checkpoint_engine", given)

    def connect(self) -> None:
        metadata = call_all(self.workers, "prepare_checkpoint_engine")
        topology = {"train_world_size": 2, "rollout_world_size": 2, "metadata": metadata}
        call_all(self.workers, "init_checkpoint_engine_process_group", topology)

    def sync_weights(self, step: int, dying: int | None = None) -> list[Any]:
        for worker in self.workers:
            worker.ask("update", step, dying)
        killed = () if dying is None else (self.rollouts[dying],)
        return [worker.answer() for worker in self.workers if worker not in killed]

    def shutdown(self) -> None:
        call_all(self.workers, "finalize_checkpoint_engine")


@pytest.fixture
def synchronizer() -> Iterator[Synchronizer]:
    made = Synchronizer()
    yield made
    for worker in made.workers:
        worker.kill()


def test_every_update_reaches_every_worker_bit_for_bit(synchronizer: Synchronizer, tmp_path: Path) -> None:
    """Two updates on each connection, except where NeMo-RL connects anew for each of them."""
    stored = {"engine": "filesystem", "options": {"path": str(tmp_path)}, "release_after_refit": True}
    for step, kwargs in enumerate([{"engine": "shm"}, {"engine": "gloo"}, stored]):
        synchronizer.create(**kwargs)
        for each in (2 * step, 2 * step + 1):
            if "release_after_refit" in kwargs or each == 2 * step:
                synchronizer.connect()
            expected = facts(weights(each).items())
            sent, received = [{}, len(expected), ""], [expected, 0, ""]
            assert synchronizer.sync_weights(each) == [sent, sent, received, received]
            if "release_after_refit" in kwargs or each != 2 * step:
                synchronizer.shutdown()
    assert not list(tmp_path.rglob("bucket*"))


def test_a_worker_that_dies_ends_the_update_and_the_policy_gathers_on(synchronizer: Synchronizer) -> None:
    synchronizer.create(engine="shm")
    synchronizer.connect()
    sender, gathering, other = synchronizer.sync_weights(1, dying=0)
    assert re.fullmatch(rf"PeerLostError rollout-.*-{synchronizer.rollouts[0].process.pid}\..*", sender[2])
    assert sender[1] == gathering[1] == len(weights(1))
    assert other[2].startswith("PeerLostError policy-")


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"engine": "smh"}, UnknownEngineError, "Did you mean 'shm'"),
        ({"engine": "nccl"}, (ConfigError, EngineUnavailableError), "nccl"),
        ({"engine": "filesystem", "options": {"path": "/tmp"}}, ConfigError, "release_after_refit"),
        ({"bucket_mib": 0}, ConfigError, "bucket_mib is 0"),
        ({"shard_expert_weights": True}, TypeError, "shard_expert_weights"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_the_workers_start(kwargs: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        create_checkpoint_engine(BACKEND, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=kwargs)


def test_the_configuration_of_the_readme_makes_an_engine_which_says_when_it_is_not_connected() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    generation = yaml.safe_load(block)["policy"]["generation"]
    assert generation["refit_transport"] == BACKEND
    kwargs = {"release_after_refit": False} | generation["refit_cfg"][BACKEND]
    engine = create_checkpoint_engine(BACKEND, bucket_size_bytes=BUCKET_BYTES, engine_kwargs=kwargs)
    with pytest.raises(ClosedError, match="not connected"):
        asyncio.run(engine.send_weights(iter(())))
    with pytest.raises(ClosedError, match="not connected"):
        asyncio.run(anext(engine.receive_weight_batches()))
