"""`Service` over ranks and a replica whose weights are texts: whose they are, and what is kept of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines import ClosedError, ConfigError, StorageError
from weightlane.trainer.runner.jobs import CreateAdapter, DropGradient, OptimStep, Publish, RemoveAdapter, SaveAdapter
from weightlane.trainer.service.config import ServedModel, ServiceConfig
from weightlane.trainer.service.records.models import REFUSED, SAVE, STEP, UNLOAD, Model
from weightlane.trainer.service.service import Service
from weightlane.trainer.service.training import scheduler
from weightlane.trainer.service.wire.requests import CreateModelRequest, request
from weightlane.trainer.service.wire.sampling_requests import SampleRequest


class Ranks:
    """Trainer ranks, their syncs, and a replica. Each step adds an s to the weights of an adapter."""

    name = "rollout-0"

    def __init__(self) -> None:
        self.weights: dict[str, str] = {}
        self.most = self.dropped = 0
        self.published: dict[int, str] = {}
        self.sampled: list[str] = []

    async def run(self, job: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(job, CreateAdapter):
            self.weights[job.name] = (job.source / "weights").read_text() if job.source else ""
            self.most = max(self.most, len(self.weights))
        elif isinstance(job, SaveAdapter):
            job.directory.mkdir()
            (job.directory / "weights").write_text(self.weights[job.name])
        elif isinstance(job, RemoveAdapter):
            del self.weights[job.name]
        elif isinstance(job, Publish):
            self.published[job.version] = self.weights[job.adapter or ""]
        elif isinstance(job, OptimStep):
            self.weights[job.adapter or ""] += "s"
            return SimpleNamespace(skipped="", step=len(self.weights[job.adapter or ""]), grad_norm=1.0)
        self.dropped += isinstance(job, DropGradient)
        return 0

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def announce(self, *_: Any) -> None:
        pass

    async def sync(self, _: int) -> None:
        pass

    async def generate(self, *_: Any, adapter: int, **__: Any) -> Any:
        self.sampled.append(self.published[adapter])
        fields = dict.fromkeys(("top_logprobs", "prompt_logprobs", "top_prompt_logprobs"))
        return SimpleNamespace(token_ids=[7], logprobs=[-1.0], finish_reason="stop", **fields)


class Client:
    """A client of a service with one session."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.ranks: Any = Ranks()
        base = ServedModel("tiny", "", directory, 32, 64, [0], {"q_proj": "attention"})
        config = ServiceConfig(max_versions=2, **settings)
        ranks = self.ranks
        self.service = Service(config, directory, base, ranks, ranks, [ranks], lambda _: None, HANG_S)
        self.session, self.count = self.service.sessions.create("c", {}), 0

    async def create(self) -> Model:
        self.count += 1
        asked = {
            "session_id": self.session,
            "model_seq_id": self.count,
            "base_model": "tiny",
            "lora_config": {"rank": 2},
        }
        payload = json.dumps(asked).encode()
        made = self.service.create_model("c", request(CreateModelRequest, payload), payload)
        await self.answer(made.id)
        return self.service.scheduler.model(made.owner, "c")

    async def train(self, model: Model, kind: str, **body: Any) -> Any:
        payload = json.dumps({"model_id": model.id, "seq_id": model.next_seq, **body}).encode()
        return await self.answer(self.service.train("c", kind, model.id, model.next_seq, payload).id)

    async def sample(self, sampler: str) -> Any:
        self.count += 1
        asked = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "seq_id": self.count}
        payload = json.dumps({**asked, "sampling_session_id": sampler}).encode()
        return await self.answer(self.service.sample("c", request(SampleRequest, payload), payload).id)

    async def answer(self, name: str) -> Any:
        found = await self.service.futures.wait(name, "c", HANG_S)
        assert found is not None
        return json.loads(found.answer) if found.media.endswith("json") or found.state == "failed" else found.state


def live(client: Client, use: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
    async def run() -> None:
        running = asyncio.create_task(client.service.run())
        await use(running)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.service.close()

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_a_sampler_has_the_weights_that_its_checkpoint_had_or_none_and_ends_with_its_session(tmp_path: Path) -> None:
    client = Client(tmp_path, max_loaded=1)

    async def use(_: object) -> None:
        model, samplers = await client.create(), []
        for number in range(3):
            await client.train(model, STEP, adam_params={})
            path = (await client.train(model, SAVE, path="latest", overwrite=True))["path"]
            samplers.append(client.service.create_sampler("c", client.session, number, None, path).id)
            assert await client.sample(samplers[-1]) == "done"
        assert await client.sample(samplers[1]) == "done", "replicas have two versions"
        assert client.ranks.sampled == ["s", "ss", "sss", "ss"]
        assert "has other weights" in (await client.sample(samplers[0]))["error"]
        assert client.ranks.most == 1, "a checkpoint that is published needs room, too"
        client.service.sessions.end(client.session, "c", "finished")
        with pytest.raises(ClosedError, match="finished"):
            await client.sample(samplers[2])

    live(client, use)


def test_requests_leave_nothing_behind_and_an_answer_that_cannot_be_stored_ends_the_service(tmp_path: Path) -> None:
    client = Client(tmp_path, max_loaded=2, save_every=1)

    async def use(running: asyncio.Task[None]) -> None:
        service, first = client.service, await client.create()
        assert "learning_rate" in (await client.train(first, STEP, adam_params={"learning_rate": -1}))["error"]
        assert client.ranks.dropped == 1, "as when it runs again after a crash"
        for seq in range(2, 2 + scheduler._REQUESTS_A_STEP):
            service.train("c", REFUSED, first.id, seq, b"", ConfigError("no.", part="x"))
        while first.waiting:  # noqa: ASYNC110 - the scheduler's own steps change it
            await asyncio.sleep(0)
        second = await client.create()
        assert first.saved_seq > 1, "requests without a step are not kept for ever"
        first.open = True  # a mini-batch
        third = await client.create()
        assert (first.loaded, second.loaded, third.loaded, client.ranks.most) == (True, False, True, 2)
        await client.train(third, UNLOAD)
        await service.scheduler.remove(third)  # as the session's end does, which has waited for the ranks

        large = bytes(1 << 20)
        service.store.change("PRAGMA max_page_count = 1")  # which is then the present size
        with pytest.raises(StorageError, match="full"):
            service.train("c", STEP, second.id, 1, large)
        service.store.change("PRAGMA max_page_count = 1000000")
        accepted = service.train("c", STEP, second.id, 2, b"{}")  # waits for number 1
        service.store.change("PRAGMA max_page_count = 1")
        service.futures.finish(accepted.id, large)
        with pytest.raises(StorageError, match="full"):
            await running

    live(client, use)
