"""Requests that replicas die of: they cost three of them at most, also across starts, and hurt no other request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from waiting import HANG_S

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.trainer.service.config import ServedModel, ServiceConfig
from weightlane.trainer.service.publications import Publications
from weightlane.trainer.service.records.checkpoints import Checkpoints
from weightlane.trainer.service.records.futures import Futures
from weightlane.trainer.service.records.store import Store
from weightlane.trainer.service.samplers import SAMPLE, Samplers

BAD, GOOD = 13, 1


class Replica:
    """Dies of prompts that begin with `BAD`."""

    def __init__(self, name: str) -> None:
        self.name, self.dead, self.asked = name, False, 0

    async def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **_: Any) -> Any:
        self.asked += 1
        self.dead = self.dead or prompt_ids[0] == BAD
        await asyncio.sleep(0)
        if self.dead:
            raise WorkerDiedError("the engine's processes are gone.", part=self.name)
        fields = dict.fromkeys(("top_logprobs", "prompt_logprobs", "top_prompt_logprobs"))
        return SimpleNamespace(token_ids=[7], logprobs=[-1.0], finish_reason="stop", **fields)


def run(directory: Path, replicas: Sequence[Replica], prompts: Sequence[int]) -> list[tuple[str, str]]:
    """Live once, with a request for each prompt beside those of before; state and error of all of them then."""
    any_part = cast("Any", None)  # the base model needs none

    async def live() -> None:
        checkpoints = Checkpoints(store, directory / "checkpoints")
        publications = Publications(any_part, any_part, {}, lambda _: None, 2, 60.0)
        living = {replica.name: replica for replica in replicas}
        base = ServedModel("tiny", "", directory, 32, 64, [0], {})
        samplers = Samplers(
            store, futures, checkpoints, publications, cast("Any", living), any_part, base, ServiceConfig()
        )
        samplers.create("sampler", "session", "client")
        samplers.resume()
        for number, prompt in enumerate(prompts):
            chunks = [{"type": "encoded_text", "tokens": [prompt]}]
            asked = {"num_samples": 2, "prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 1}}
            seq = len(store.requests_since("sampler", -1))
            payload = json.dumps({**asked, "sampling_session_id": "sampler", "seq_id": number}).encode()
            samplers.start(futures.accept(SAMPLE, "sampler", seq, "client", payload)[0])
        await samplers.close(HANG_S)

    directory.mkdir(exist_ok=True)
    store = Store(directory / "store.sqlite")
    futures = Futures(store)
    try:
        asyncio.run(live())
        return [(each.state, each.answer.decode(errors="replace")) for each in store.requests_since("sampler", -1)]
    finally:
        store.close()


def test_a_request_of_which_replicas_die_fails_before_it_has_killed_them_all(tmp_path: Path) -> None:
    replicas = [Replica(f"rollout-{number}") for number in range(4)]
    (bad,) = run(tmp_path / "files", replicas, [BAD])
    assert bad[0] == "failed"
    assert "3 engines have died while they computed this request" in bad[1]
    assert sorted(each.dead for each in replicas) == [False, True, True, True]
    _, good = run(tmp_path / "files", [each for each in replicas if not each.dead], [GOOD])
    assert good[0] == "done"


def test_a_request_of_which_the_last_replica_dies_runs_again_twice_and_no_more(tmp_path: Path) -> None:
    for _ in range(2):
        replica = Replica("rollout-0")
        found = run(tmp_path / "files", [replica], [])[:1] or run(tmp_path / "files", [replica], [BAD])
        assert found == [("queued", "")], "there was nobody left to compute it"
        assert replica.dead
    third, fourth = Replica("rollout-0"), Replica("rollout-0")
    assert run(tmp_path / "files", [third], [])[0][0] == "failed"
    assert third.dead
    assert [state for state, _ in run(tmp_path / "files", [fourth], [GOOD])] == ["failed", "done"]
    assert not fourth.dead
