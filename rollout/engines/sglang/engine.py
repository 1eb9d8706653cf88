"""`SglangEngine`: the rollout engine `sglang`. The package's docstring says what it relies on in SGLang."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)

from ...commit.one_rank_engine import OneRankEngine, RunningUpdate
from ...commit.receiving_rank import ReceivingRank
from ...commit.remote_failure import quarantined
from ...config import RolloutConfig
from ...contract.engine import PlannedNeeds, RolloutCapabilities, UpdateFigures
from ...contract.http_calls import HttpCalls
from ...contract.limits import limited
from ...contract.records import Completion
from ...contract.requests import GenerationRequest
from ...layout.loading.checkpoint_expectation import expectation_of
from .generation import StreamedAnswer, body_of, chunks_of
from .loader import SglangLoader
from .process import ServerProcess, options_of
from .server_facts import ServerFacts, check_answers, checkpoint_facts, served_facts

_CALL_S = 10.0
"""Most seconds of a call that changes nothing, and of ending a request or a rank."""
_KIND = "an SGLang server"
_POLL_S = 0.5
_RESERVED_TOKENS = 6
"""Tokens of its context that SGLang keeps from a request and its completion (``managers/tp_worker.py``)."""
_CONTINUE = {"torch_empty_cache": False}
"""Emptying torch's cache of device memory would make the pause longer."""
_UNCHANGED = "Failed to get weights iterator"
"""SGLang's message where it has not begun to write (``model_runner_components/weight_updater.py``)."""


@dataclass
class _Request:
    rid: str
    answer: StreamedAnswer
    reading: asyncio.Task[Completion]
    prompt_tokens: int


class SglangEngine(OneRankEngine):
    """One SGLang server, which this engine starts, or which runs already: `RolloutConfig.extra_engine_args`.

    The engine's own process stages versions. A commit writes one to a file in memory while the server generates, retracts the
    requests, has the server load the file, and lets it continue.
    """

    capabilities: ClassVar[RolloutCapabilities] = RolloutCapabilities(
        summary="SGLang, unchanged: a server of its own or one that runs already, over HTTP; versions as files in memory.",
        keeps_caches=False,
        extra_arguments=True,
    )

    def __init__(self, name: str, config: RolloutConfig, model_dir: str | os.PathLike[str]) -> None:
        super().__init__(name, config, model_dir)
        self._calls: HttpCalls | None = None
        """Calls to the server; None before `start` and after `close`."""
        self._process: ServerProcess | None = None
        self._facts: ServerFacts | None = None
        self._loader: SglangLoader | None = None
        self._requests: dict[str, _Request] = {}
        """Requests in flight by key."""
        self._labels: list[int] = []
        """Versions that the running update may make the server serve, in this order: the second if the first fails."""
        self._version = 0
        self._gone: WorkerDiedError | None = None

    @classmethod
    def check(cls, config: RolloutConfig, model_dir: Path) -> str:
        """Refuse options that contradict each other, and a model without a configuration."""
        options_of(config)
        checkpoint_facts(config, model_dir)
        return ""

    @classmethod
    def planned_needs(cls, config: RolloutConfig, model_dir: Path) -> PlannedNeeds:
        """The one rank asks for whole tensors."""
        return PlannedNeeds((None,), checkpoint_facts(config, model_dir).dtype, "SGLang loads whole tensors")

    @property
    def dead(self) -> bool:
        """Whether the server has ended, or answers no calls any more."""
        return self._gone is not None or (self._process is not None and self._process.exit_code is not None)

    async def start(self, version: int) -> None:
        """Start a server, or find the one that runs, and serve its weights as `version`."""
        if not self.model_dir.is_dir():
            raise ConfigError(f"model directory {self.model_dir} does not exist.", part=self.name)
        options, wanted = options_of(self.config), checkpoint_facts(self.config, self.model_dir)
        limit_s = self.config.start_limit_s
        late = f"the server was not ready within {limit_s:.0f} s."
        try:
            async with limited(
                limit_s, DeadlineExceededError(late, part=self.name, hint="Raise rollout.start_timeout_s.")
            ):
                if options.server:
                    self._calls = HttpCalls(options.server, options.api_key, self.name, _KIND)
                else:
                    self._process = await asyncio.to_thread(
                        ServerProcess,
                        self.config,
                        self.model_dir,
                        dtype=wanted.dtype,
                        context_length=min(self.config.max_model_len + _RESERVED_TOKENS, wanted.max_model_len),
                        version=version,
                    )
                    self._calls = HttpCalls(self._process.url, self._process.token, self.name, _KIND)
                await self._become_reachable(self._calls)
                self._facts = await served_facts(self._calls, wanted, self.name, _CALL_S)
                if self._process is None:  # It may have another run's weights, and be paused.
                    await self._load(self._calls, self.model_dir.absolute(), version, self.config.start_limit_s)
                    await self._calls.post("continue_generation", _CONTINUE, _CALL_S)
                await check_answers(self._calls, self.name)
        except BaseException:
            await self.close()
            raise
        self._version, self.dtype, self.vocab_size = version, self._facts.dtype, self._facts.vocab_size
        self.max_model_len = min(self.config.max_model_len, self._facts.max_model_len)
        dtype: torch.dtype = getattr(torch, self.dtype)
        expectation = expectation_of(self.model_dir, dtype=dtype, tied_embeddings=self._facts.tied_embeddings)
        loop = asyncio.get_running_loop()

        def serve(directory: Path) -> None:
            # `_serve` keeps the deadline itself, unless the loop has ended.
            limit_s = self.updating.deadline.remaining_s + _CALL_S
            asyncio.run_coroutine_threadsafe(self._serve(directory), loop).result(limit_s)

        self._loader = SglangLoader(expectation, "rollout rank 0", serve)
        self.follow(self._loader)

    async def generate(self, request: GenerationRequest, arrived: Callable[[int], None]) -> Completion:
        """Generate one completion."""
        self.running()
        assert self._facts is not None, "started"
        request = request.fitted(self.max_model_len, self.name)
        sampling = request.sampling
        if sampling.seed is not None and not self._facts.seeds:
            raise ConfigError(
                "SGLang draws by seeds only if it is started for it.",
                part=self.name,
                hint="Set enable_deterministic_inference = true in rollout.extra_engine_args.",
            )
        if not sampling.greedy and sampling.top_k and sampling.top_p < 1:
            raise ConfigError(
                "SGLang takes the share top_p of all tokens, and not of those that top_k leaves.",
                part=self.name,
                hint="Ask for one of the two.",
            )
        tokenizer = await self.tokenizer_for(request)
        # Of equal length, because an abort ends all requests whose id begins with the one it names.
        rid, answer = uuid.uuid4().hex, StreamedAnswer(request, tokenizer, self.name)
        reading = asyncio.create_task(self._read(rid, request, answer, arrived))
        self._requests[request.key] = _Request(rid, answer, reading, len(request.prompt_ids))
        try:
            await asyncio.wait([reading])
            if reading.cancelled():
                raise ClosedError(f"request {request.request_id} was ended.", part=self.name)
            return reading.result()
        except WorkerDiedError as error:
            await self._look_after(error)
            raise
        finally:
            self._requests.pop(request.key, None)
            if not reading.done():
                reading.cancel()
                await asyncio.wait([reading])

    async def _read(
        self, rid: str, request: GenerationRequest, answer: StreamedAnswer, arrived: Callable[[int], None]
    ) -> Completion:
        """Read the answer to a request. However this ends, the server ends the request, too."""
        assert self._facts is not None, "started"
        assert self._calls is not None, "started"
        calls, asked = self._calls, False
        body = body_of(request, rid, vocab_size=self.vocab_size, seeds=self._facts.seeds)
        try:
            async with aclosing(chunks_of(calls, body)) as chunks:
                async for chunk in chunks:
                    if tokens := answer.add_chunk(chunk):
                        arrived(tokens)
                    if answer.complete:
                        return answer.completion()
                    if answer.stopped and not asked:  # The last chunk says which weights have generated the tokens.
                        asked = True
                        await calls.post("abort_request", {"rid": rid}, _CALL_S)
            raise WorkerDiedError("an answer of the server ended early.", part=self.name, peer=calls.url)
        finally:
            if not answer.complete and not asked:
                with suppress(WeightlaneError):
                    await calls.post("abort_request", {"rid": rid}, _CALL_S)

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> UpdateFigures:
        """Have the server load a version while its requests wait. They then prefill again."""
        try:
            return await super().update(fields, serves=serves, trusted=trusted)
        except (UntouchedError, QuarantinedError) as failure:
            if self.dead:
                raise self.died() from failure
            raise

    def make_update(self, rank: ReceivingRank, fields: Mapping[str, Any], update: RunningUpdate) -> None:
        """See `OneRankEngine.make_update`."""
        self._labels = [update.serves, self._version]
        super().make_update(rank, fields, update)
        self._version = update.serves

    async def _serve(self, directory: Path) -> None:
        """Let the server load `directory` between two steps; see `SglangLoader`."""
        calls, loader, version, update = self._calls, self._loader, self._labels.pop(0), self.updating
        assert calls is not None, "started"
        assert loader is not None, "started"
        update.check(self.name)
        began = time.monotonic()
        computed = [each for each in self._requests.values() if each.answer.token_ids]
        recomputed = sum(each.prompt_tokens + len(each.answer.token_ids) for each in computed)
        loader.writes_atomically = False
        try:
            load_s = await self._load(calls, directory, version, update.deadline.remaining_s)
        except WorkerDiedError as error:
            await self._look_after(error)
            raise
        except DeadlineExceededError as late:  # It may be paused, and it may load the version yet.
            raise quarantined(late, self.name, "The server must not serve") from late
        except ConfigError as refused:
            loader.writes_atomically = _UNCHANGED in refused.message
            if loader.writes_atomically and update.trusted:
                await self._resume(calls)
            raise CommitError(
                f"the server did not load version {version}: {refused.message}",
                part=self.name,
                peer=calls.url,
                hint="It has to run on this machine, as this user.",
            ) from refused
        await self._resume(calls)
        update.figures = UpdateFigures(time.monotonic() - began, load_s, recomputed)

    async def _load(self, calls: HttpCalls, directory: Path, version: int, limit_s: float) -> float:
        """Pause the server, and let it load the files of `directory`. Returns the seconds of loading."""
        deadline = Deadline.after(limit_s)
        await calls.post("pause_generation", {"mode": "retract"}, deadline.remaining_s)
        paused = time.monotonic()
        body = {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
        await calls.post("update_weights_from_disk", body, deadline.remaining_s)
        return time.monotonic() - paused

    async def _resume(self, calls: HttpCalls) -> None:
        """Let the server continue, unless nobody waits for the update any more: it is quarantined then."""
        try:
            if self.updating.given_up.is_set():
                raise DeadlineExceededError("the update took too long.", part=self.name)
            await calls.post("continue_generation", _CONTINUE, self.updating.deadline.remaining_s)
        except WeightlaneError as error:
            raise quarantined(error, self.name, "The server is paused") from error

    async def abort(self, keys: Collection[str]) -> None:
        """End requests in flight."""
        found = [self._requests[key].reading for key in keys if key in self._requests]
        for reading in found:
            reading.cancel()
        if found:
            await asyncio.wait(found, timeout=_CALL_S)

    async def close(self) -> None:
        """End the server, if this engine has started it, and the rank."""
        await self.abort(list(self._requests))
        await self.leave()
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.close)

    def died(self) -> WeightlaneError:
        """The end of the server's log, or the error of the call that it did not answer."""
        if self._gone is None or (self._process is not None and self._process.exit_code is not None):
            return self._ended("the server has ended")
        return self._gone

    async def _become_reachable(self, calls: HttpCalls) -> None:
        """Wait until the server generates, or answers if it may be paused. The caller limits the time."""
        while not await calls.answers("model_info" if self._process is None else "health", _CALL_S):
            if self._process is not None and self._process.exit_code is not None:
                raise self._ended("the server ended while starting")
            await asyncio.sleep(_POLL_S)

    async def _look_after(self, error: WorkerDiedError) -> None:
        """Note that the server is gone, unless it still answers after the `error` of one call."""
        calls = self._calls
        if calls is not None and not self.dead:
            try:
                await calls.get("model_info", _CALL_S)
            except WeightlaneError:
                self._gone = self._gone or error

    def _ended(self, what: str) -> WorkerDiedError:
        assert self._process is not None, "started here"
        return WorkerDiedError(
            f"{what}, with exit code {self._process.exit_code}. The end of its log: {self._process.last_lines()}",
            part=self.name,
            peer=self.name,
        )
