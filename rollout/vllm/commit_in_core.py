"""A complete commit in one call: vLLM's engine core pauses, replaces the weights and resumes, between two decode steps.

The engine core is the process that schedules decode steps and calls the workers. Once `install` has run there, an
``update_weights`` with a field ``engine_commit`` does everything that a commit needs::

    update_weights({"version": 7, "engine_commit": {"weight_version": "7", "caches": "recompute", "within_s": 54.0}})

The call pauses scheduling, lets the step in progress end, drops caches if asked to, replaces the weights of all ranks, marks
later tokens with ``weight_version``, and resumes. A client would need one call for each of these, and nothing is decoded while a
call waits. A client that dies in the middle does not leave the engine paused.

After a failure the engine resumes if the old weights are in place on every rank and ``trusted`` is set. Otherwise
it stays paused until a version has been committed. It also stays paused if the update took longer than ``within_s``, because the
client has given up by then.

Other clients of vLLM's protocol make three calls, and the last one is a complete commit in the same way::

    start_weight_update(); update_weights({"version": 7}); finish_weight_update()

An engine that has slept deeply (``sleep(level=2)``) holds no version: it stays paused until one has been committed, whatever
woke up before. A commit while the weights sleep fails, and changes nothing.

It has no ``within_s``: a client that gives up leaves one complete version, and later tokens say which one. An engine that the
client paused itself stays paused.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from weightlane.ckpt_engines import CommitError, ConfigError, Deadline, as_weightlane_error
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse, memory_use

from ..commit.remote_failure import RemoteFailureError, failure_from_text
from ..commit.transfer_calls import DEEP, MEMORY_USE, EngineCommit, validated
from ..vllm_surface import EngineCore, EngineCoreProc, EngineCoreRequestType, check_attributes, uses_weightlane

_PART = "vLLM's engine core"
_HINT = "Raise commit_timeout_s."
_ONE_CLIENT = "Let one client at a time update a vLLM."
_REFUSED_BY_ALL = frozenset({"update_weights", "finish_weight_update", "start_draft_weight_update"})
"""Calls that vLLM refuses on every rank if a client makes them out of order."""
_untrusted: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engine cores that a failed commit or a deep sleep has left paused, and no client: the next commit resumes them."""

T = TypeVar("T")


def install() -> None:
    """Make vLLM's engine core in this process, if there will be one, commit versions between two decode steps.

    An engine core whose configuration does not name weightlane's transfer engine works as before.
    """
    plain = EngineCore.collective_rpc
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def collective_rpc(core: Any, *args: Any, **kwargs: Any) -> Any:
        if uses_weightlane(core.vllm_config):
            call = signature.bind(core, *args, **kwargs).arguments
            update = (call.get("kwargs") or {}).get("update_info")
            if call["method"] == "init_weight_transfer_engine":
                check_core(core)
            elif call["method"] == "update_weights" and isinstance(update, Mapping) and "engine_commit" in update:
                return commit_in_core(core, update)
            elif call["method"] == "start_weight_update":
                return core.model_executor.collective_rpc(start_on_rank)
            elif call["method"] == "finish_weight_update" and all(core.model_executor.collective_rpc(has_update)):
                return finish_in_core(core)
            elif call["method"] in _REFUSED_BY_ALL:
                return _call_all(core, call)
            elif call["method"] == MEMORY_USE:
                return core.model_executor.collective_rpc(memory_use_of_rank)
        return plain(core, *args, **kwargs)

    EngineCore.collective_rpc = collective_rpc
    EngineCore.sleep, EngineCore.wake_up = _sleeping(EngineCore.sleep), _waking(EngineCore.wake_up)


def _sleeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.sleep` that notes when the weights are lost: the core then resumes with a version, and not by waking."""

    @functools.wraps(plain)
    def sleep(core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= DEEP and uses_weightlane(core.vllm_config):
            _untrusted.add(core)
        return plain(core, level, *args, **kwargs)

    return sleep


def _waking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.wake_up` after which a core without a version stays paused."""

    @functools.wraps(plain)
    def wake_up(core: Any, *args: Any, **kwargs: Any) -> Any:
        awake = plain(core, *args, **kwargs)
        if core in _untrusted:
            core.pause_scheduler(mode="keep", clear_cache=False)
        return awake

    return wake_up


def _resume(core: Any) -> None:
    """Let the core schedule again, unless a part of its memory sleeps: waking that part does it."""
    if not core.model_executor.is_sleeping:
        core.resume_scheduler()


def check_core(core: Any) -> None:
    """Raise the `RemoteFailureError` of a `ConfigError` if `core` lacks something that a commit uses."""
    try:
        for path in (
            "scheduler.requests",
            "scheduler.running",
            "model_executor.collective_rpc",
            "model_executor.is_sleeping",
            "vllm_config.model_config",
        ):
            check_attributes(core, path, "the engine core")
        if isinstance(core, EngineCoreProc):  # one in its client's process reads no messages
            check_attributes(core, "input_queue", "the engine core")
    except ConfigError as error:
        raise _failure(error, intact=True) from error


def commit_in_core(core: Any, update: Mapping[str, Any]) -> Any:
    """Make `update` on every rank of `core` between two decode steps. Called by the thread that runs the steps.

    Returns a list with one dictionary: the seconds ``blocked_s`` and ``load_s``, and ``recomputed_tokens``; see `CommitReport`.
    While a step is in progress, returns a future of that list, and vLLM answers its client when the future is done.

    Raises:
        RemoteFailureError: With the typed error, and whether the old weights are in place.
    """
    began = time.monotonic()
    try:
        options = validated(EngineCommit, update["engine_commit"])
    except Exception as error:
        raise _failure(error, intact=True) from error
    ranks_update = {name: value for name, value in update.items() if name != "engine_commit"}
    if "adapter" in ranks_update:
        # Also where a client gave up a request, and this engine has not dropped it yet.
        begun = [request.lora_request for request in core.scheduler.requests.values()]
        used = {lora.lora_int_id for lora in begun if lora is not None}
        ranks_update["in_use"] = sorted(used.union(ranks_update.get("in_use", ())))
    deadline = Deadline.after(options.within_s)
    return _between_steps(core, lambda: _commit_paused(core, ranks_update, options, deadline, began))


def finish_in_core(core: Any) -> Any:
    """End an update session of vLLM's between two decode steps, which commits the update that every rank has accepted.

    Returns None, or a future while a step is in progress.

    Raises:
        RemoteFailureError: As `commit_in_core`.
    """
    resumes = not core.is_scheduler_paused() or core in _untrusted
    return _between_steps(core, lambda: _finish_paused(core, resumes=resumes))


def _between_steps(core: Any, commit: Callable[[], T]) -> T | Future[T]:
    """The result of `commit`, which is called once `core` is paused, or a future of it while a step is in progress."""
    paused = core.pause_scheduler(mode="keep", clear_cache=False)
    if paused is None:
        return commit()
    answer: Future[T] = Future()

    def step_ended(done: Future[None]) -> None:
        try:
            done.result()
            answer.set_result(commit())
        except Exception as error:  # noqa: BLE001 - the error is the answer
            answer.set_exception(error)
        # The core would now wait for a client's message, although its requests can continue.
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    paused.add_done_callback(step_ended)
    return answer


def _commit_paused(
    core: Any, update: Mapping[str, Any], options: EngineCommit, deadline: Deadline, began: float
) -> list[dict[str, float]]:
    """Replace the weights while the engine is paused, and resume."""
    touched = False
    try:
        deadline.check("the decode step in progress to end", part=_PART, hint=_HINT)
        recomputed = _drop_caches(core) if options.caches == "recompute" else 0
        loading = time.monotonic()
        touched = True
        core.model_executor.collective_rpc(update_rank, args=(update,))
    except Exception as error:  # noqa: BLE001 - raised again
        _resume_after(core, error, touched=touched, resumes=options.trusted)
    loaded = time.monotonic()
    core.set_weight_version(options.weight_version)
    if deadline.expired:
        _untrusted.add(core)
        late = deadline.error("all ranks to replace their weights", part=_PART, hint=_HINT)
        raise _failure(late, intact=False)
    _untrusted.discard(core)
    _resume(core)
    return [{"blocked_s": time.monotonic() - began, "load_s": loaded - loading, "recomputed_tokens": recomputed}]


def _finish_paused(core: Any, *, resumes: bool) -> None:
    """Let every rank make the update that it has accepted, while the engine is paused, and resume if it `resumes`."""
    if not all(core.model_executor.collective_rpc(has_update)):  # another client's call was handled since
        if resumes and core not in _untrusted:
            _resume(core)
        lost = "another client has ended the update session, or begun its own."
        raise _failure(CommitError(lost, part=_PART, hint=_ONE_CLIENT), intact=False)
    touched = False
    try:
        _drop_caches(core)
        touched = True
        versions = core.model_executor.collective_rpc(finish_on_rank)
    except Exception as error:  # noqa: BLE001 - raised again
        trusted = core not in _untrusted
        _resume_after(core, error, touched=touched, resumes=resumes and trusted, paused_by_client=not resumes)
    core.set_weight_version(str(versions[0]))
    _untrusted.discard(core)
    if resumes:
        _resume(core)


def _resume_after(
    core: Any, error: Exception, *, touched: bool, resumes: bool, paused_by_client: bool = False
) -> NoReturn:
    """Resume if the old weights are in place and the engine `resumes` with them. Raises `error` in any case."""
    intact = not touched or failure_from_text(str(error), part=_PART).intact
    if intact and resumes:
        _resume(core)
    elif not intact and not paused_by_client:
        _untrusted.add(core)
    raise error if touched else _failure(error, intact=True) from error


def _call_all(core: Any, call: Mapping[str, Any]) -> list[Any]:
    """Make a client's call on every rank. Raises the first rank's error once all have answered.

    vLLM's own executor stops at the first error, and takes the answers of the other ranks for answers to the next call.
    """
    arguments = call["method"], call.get("args") or (), call.get("kwargs") or {}
    answers = core.model_executor.collective_rpc(try_on_rank, timeout=call.get("timeout"), args=arguments)
    for _, error in answers:
        if error is not None:
            raise RuntimeError(error)
    return [answer for answer, _ in answers]


def try_on_rank(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Call a method of a rank's worker. Returns its result, or the text of its error."""
    try:
        return getattr(worker, method)(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - the engine core raises it
        return None, str(error) or type(error).__name__


def update_rank(worker: Any, update: Mapping[str, Any]) -> None:
    """Make `update` on one rank, in an update session of vLLM's that this call opens and closes. Runs in every worker process."""
    if "adapter" in update:  # no weight changes: at the end of such a session vLLM would drop all adapters
        worker.weight_transfer_engine.commit_update(update)
        return
    start_on_rank(worker)
    worker.update_weights(update)
    _end_session(worker)


def start_on_rank(worker: Any) -> None:
    """Open an update session of vLLM's on one rank. A session that a client left open is ended, and its update dropped."""
    worker.weight_transfer_engine.start_weight_update()
    with suppress(RuntimeError):  # vLLM raises this if no session is open
        worker.finish_weight_update()
    worker.start_weight_update()


def has_update(worker: Any) -> bool:
    """Whether the end of the update session would change the weights of this rank."""
    return bool(worker.weight_transfer_engine.has_update)


def finish_on_rank(worker: Any) -> int | None:
    """End the update session, which commits its update. Returns the version of the rank's weights."""
    _end_session(worker)
    return worker.weight_transfer_engine.version  # type: ignore[no-any-return]  # the worker is vLLM's


def _end_session(worker: Any) -> None:
    """Commit the update of the session, and end the session also if that fails: vLLM would leave it open."""
    try:
        worker.finish_weight_update()
    except Exception:
        worker.finish_weight_update()  # the update is dropped by now
        raise


def memory_use_of_rank(worker: Any) -> MemoryUse:
    """See `memory_use`. Runs in every worker process."""
    return memory_use(worker.weight_transfer_engine.device)


def _drop_caches(core: Any) -> int:
    """Drop what the old weights computed. Preprocessed inputs stay. Returns how many tokens requests in flight prefill again."""
    dropped: int = sum(request.num_computed_tokens for request in core.scheduler.running)
    if not core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise RuntimeError("the cache of the KV connector could not be emptied.")
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()
    return dropped


def _failure(error: Exception, *, intact: bool) -> RemoteFailureError:
    return RemoteFailureError(as_weightlane_error(error, _PART), intact=intact)
