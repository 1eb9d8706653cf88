"""A whole commit inside vLLM's engine core: in what order it is done, and when the engine goes on decoding."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from weightlane.ckpt_engines import ConfigError, Deadline, DeadlineExceededError
from weightlane.rollout.commit.remote_failure import RemoteFailureError

pytestmark = pytest.mark.vllm

UPDATE = {"version": 7, "engine_commit": {"weight_version": "7"}}


class Core:
    """The engine core, as far as a commit sees it. Notes what is done to it."""

    def __init__(self, exchange: Callable[[], None] = lambda: None) -> None:
        self.done: list[str] = []
        self.under_way: Future[None] | None = None
        """A pause that waits for the step under way; None while there is none."""
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.model_executor = self
        self.is_sleeping = False
        self.scheduler = SimpleNamespace(requests={}, running=[SimpleNamespace(num_computed_tokens=n) for n in (5, 2)])
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=True))
        self.paused, self.updated = False, True
        """Whether a client has paused the engine, and whether one has sent it an update."""
        self._exchange = exchange

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None] | None:
        assert (mode, clear_cache) == ("keep", False)
        self.done.append("pause")
        return self.under_way

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert (reset_running_requests, reset_connector) == (True, True)
        self.done.append("drop prefixes")
        self.scheduler.running.clear()
        return True

    def reset_encoder_cache(self) -> None:
        self.done.append("drop encodings")

    def collective_rpc(self, method: Any, args: tuple[Any, ...] = ()) -> Any:
        if method.__name__ in ("has_update", "start_on_rank"):
            return [self.updated]
        if method.__name__ == "update_rank":
            assert args == ({"version": 7},), "what is the core's own business goes to no rank"
        else:
            assert method.__name__ == "finish_on_rank"
        self.done.append("exchange")
        self._exchange()
        return [8]

    def set_weight_version(self, version: str) -> None:
        self.done.append(f"stamp {version}")

    def resume_scheduler(self) -> None:
        self.done.append("resume")


@pytest.fixture
def commit_in_core() -> Callable[..., Any]:
    from weightlane.rollout.vllm.commit_in_core import commit_in_core

    return commit_in_core


def test_caches_are_dropped_before_and_tokens_stamped_after_the_exchange(commit_in_core: Callable[..., Any]) -> None:
    core = Core()
    [figures] = commit_in_core(core, UPDATE)
    assert core.done == ["pause", "drop prefixes", "drop encodings", "exchange", "stamp 7", "resume"]
    assert 0.0 <= figures["load_s"] <= figures["blocked_s"]
    assert figures["recomputed_tokens"] == 7, "counted before the scheduler gives them up"
    kept = Core()
    [figures] = commit_in_core(kept, {"version": 7, "engine_commit": {"weight_version": "7", "caches": "keep"}})
    assert (kept.done, figures["recomputed_tokens"]) == (["pause", "exchange", "stamp 7", "resume"], 0)


def test_only_an_engine_that_names_weightlane_works_otherwise_and_it_is_looked_at_when_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever arguments vLLM's own method takes are passed on."""
    from vllm.v1.engine.core import EngineCore

    from weightlane.rollout.vllm import commit_in_core

    def plain(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, *, new: int = 0) -> Any:
        return method, timeout, args, kwargs, new

    monkeypatch.setattr(EngineCore, "collective_rpc", plain)
    monkeypatch.setattr(commit_in_core, "commit_in_core", lambda _, update: ["committed", update])
    commit_in_core.install()
    core = Core()
    update = {"update_info": UPDATE}
    for backend, answer in (
        (None, ("update_weights", None, (), update, 3)),
        ("nccl", ("update_weights", None, (), update, 3)),
        ("weightlane", ["committed", UPDATE]),
    ):
        core.vllm_config.weight_transfer_config = backend and SimpleNamespace(backend=backend)
        assert EngineCore.collective_rpc(core, "update_weights", kwargs=update, new=3) == answer
    scheduler = core.__dict__.pop("scheduler")
    with pytest.raises(RemoteFailureError, match=r"the engine core of this vLLM.* has no scheduler\.requests"):
        EngineCore.collective_rpc(core, "init_weight_transfer_engine")
    core.scheduler = scheduler
    assert EngineCore.collective_rpc(core, "init_weight_transfer_engine")[0] == "init_weight_transfer_engine"


def test_a_step_under_way_ends_first_and_the_core_is_woken_after(commit_in_core: Callable[..., Any]) -> None:
    core = Core()
    core.under_way = Future()
    answer = commit_in_core(core, UPDATE)
    assert core.done == ["pause"]
    core.under_way.set_result(None)
    assert answer.result(0)[0].keys() == {"blocked_s", "load_s", "recomputed_tokens"}
    assert (core.done[-1], core.input_queue.get_nowait()[0].name) == ("resume", "WAKEUP")


def test_what_fails_before_the_exchange_leaves_the_old_weights_serving_and_says_so(
    commit_in_core: Callable[..., Any],
) -> None:
    core = Core()
    core.reset_prefix_cache = lambda **_: False  # type: ignore[method-assign]
    with pytest.raises(RemoteFailureError, match="KV connector") as raised:
        commit_in_core(core, UPDATE)
    assert (raised.value.intact, core.done) == (True, ["pause", "resume"])
    untouched = Core()
    with pytest.raises(RemoteFailureError, match="weight_version") as refused:
        commit_in_core(untouched, {"version": 7, "engine_commit": {}})
    assert isinstance(refused.value.error, ConfigError)
    assert untouched.done == []


def test_a_client_that_has_given_up_finds_the_engine_paused_after_the_exchange_and_serving_before_it(
    commit_in_core: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        now += 61.0

    after = Deadline.after
    monkeypatch.setattr(Deadline, "after", lambda seconds: after(seconds, lambda: now))
    late = Core(pass_time)
    with pytest.raises(RemoteFailureError, match="commit_timeout_s") as raised:
        commit_in_core(late, UPDATE)
    assert isinstance(raised.value.error, DeadlineExceededError)
    assert not raised.value.intact
    assert late.done[-1] == "stamp 7"
    core = Core()
    core.under_way = Future()
    answer = commit_in_core(core, UPDATE)
    pass_time()
    core.under_way.set_result(None)
    with pytest.raises(RemoteFailureError) as before:
        answer.result(0)
    assert (before.value.intact, core.done) == (True, ["pause", "resume"])


def test_the_last_of_vllms_own_calls_is_a_complete_commit_which_leaves_an_engine_paused_that_a_client_has_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine.core import EngineCore

    from weightlane.rollout.vllm import commit_in_core

    monkeypatch.setattr(EngineCore, "collective_rpc", EngineCore.collective_rpc)
    commit_in_core.install()
    whole = ["pause", "drop prefixes", "drop encodings", "exchange", "stamp 8"]
    failures: list[Exception] = []
    core = Core(lambda: None if not failures else (_ for _ in ()).throw(failures.pop()))
    core.vllm_config.weight_transfer_config = SimpleNamespace(backend="weightlane")

    def finish(paused: bool, intact: bool | None = None) -> list[str]:
        core.paused = paused
        core.done.clear()
        failures[:] = [] if intact is None else [RemoteFailureError(ConfigError("no"), intact=intact)]
        with suppress(RemoteFailureError):
            EngineCore.collective_rpc(core, "finish_weight_update")
        return [*core.done]

    assert finish(paused=False) == [*whole, "resume"]
    assert finish(paused=True) == whole
    assert finish(paused=False, intact=True) == [*whole[:-1], "resume"]
    assert finish(paused=False, intact=False) == whole[:-1]
    assert finish(paused=True) == [*whole, "resume"], "paused by that failure, and not by a client"
    assert finish(paused=True, intact=False) == finish(paused=True)[:-1] == whole[:-1]
    core.under_way, core.paused = Future(), False
    answer = EngineCore.collective_rpc(core, "finish_weight_update")
    core.updated = False
    core.under_way.set_result(None)
    with pytest.raises(RemoteFailureError, match="another client has ended"):
        answer.result(0)
    assert core.done[-2:] == ["pause", "resume"]
