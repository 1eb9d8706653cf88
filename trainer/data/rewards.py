"""The user's reward function: import it, call it concurrently with the run, and refuse results that are not numbers."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import multiprocessing
import numbers
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from weightlane.ckpt_engines import RewardError
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from ..config import RewardConfig
from .named_function import function_named

_PART = "reward"
_CLOSE_S = 5.0
_PR_SET_PDEATHSIG = 1
LARGEST_REWARD = 1e30
"""Largest absolute reward. Rewards are squared and the squares summed, which must not overflow."""
_PROCESS_START_S = 120.0
"""Seconds beyond its limit that a call may take because its process may have to be started first."""
_one_at_a_time = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
Judge = Callable[[str, Mapping[str, Any]], float]
"""Function that returns the reward of a completion of a task; raises `RewardError` if it can't."""
_judges: list[Judge] = []
"""In a process of the pool: its reward function."""


class Reward:
    """A reward function given as ``"module:function"``, called as ``function(completion: str, task: Mapping) -> float``.

    It may also be an ``async`` function, whose calls are cancelled after `time_limit_s` seconds; None for never. This object can
    be pickled for another process, which imports the function again.

    `function` is imported by `function_named`, from `search_path` first. Raises `ConfigError` if there is none.
    """

    def __init__(self, function: str, search_path: Sequence[Path] = (), time_limit_s: float | None = None) -> None:
        self.name = function
        self._time_limit_s = time_limit_s
        self._search_path = tuple(search_path)
        self._function: Callable[[str, Mapping[str, Any]], object] = function_named(
            function, search_path, part=_PART, setting="reward.function"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Reward, (self.name, self._search_path, self._time_limit_s)

    def __call__(self, completion: str, task: Mapping[str, Any]) -> float:
        """Return the reward of `completion`.

        Raises `RewardError`, naming the function, the prompt and the value, when the function raises or does not return a
        finite real number.
        """
        prompt = task.get("prompt")
        try:
            value = self._function(completion, task)
            if inspect.isawaitable(value):
                value = _awaited(value, self._time_limit_s)
            number = _as_float(value)
        except (Exception, SystemExit, asyncio.CancelledError) as cause:  # code of a completion may call `exit()`
            raise RewardError(
                f"{self.name} raised {type(cause).__name__}: {cause} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint="Fix the reward function.",
            ) from cause
        if number is None or not abs(number) <= LARGEST_REWARD:  # NaN is not
            raise RewardError(
                f"{self.name} returned {value!r} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint=f"A reward must be a number, and at most {LARGEST_REWARD:.0e}.",
            )
        return number


class RewardPool:
    """Calls a reward function outside the event loop, several calls at once, each with a time limit.

    It has threads or processes of its own: a slow function delays only the samples that it is called for. A thread beyond its
    limit is abandoned; a process is killed and replaced.

    For processes `judge` must be picklable, as `Reward` is.
    """

    def __init__(self, judge: Judge, config: RewardConfig) -> None:
        self._judge = judge
        self._config = config
        self._free = asyncio.Semaphore(config.workers)
        # The semaphore limits concurrent calls; threads have no limit, since abandoned ones do not count.
        self._threads = DaemonThreads(sys.maxsize, "weightlane-reward")
        self._processes: ProcessPool | None = None

    async def __call__(self, completion: str, task: Mapping[str, Any]) -> float:
        """Return the reward of `completion`. Raises `RewardError`, also if the call exceeds its time limit."""
        async with self._free:
            limit_s = self._config.time_limit_s
            try:
                ended = asyncio.wrap_future(self._begin(completion, task))
            except Exception as cause:
                self._drop_processes()
                raise self._error(f"could not be called ({type(cause).__name__}: {cause})", completion, task) from cause
            # The pool kills a process at its limit and reports it; this takes time, and so does starting a process.
            in_process = self._processes is not None
            await asyncio.wait({ended}, timeout=limit_s + _PROCESS_START_S if in_process else limit_s)
            if not ended.done():
                ended.cancel()
                self._drop_processes()
            else:
                try:
                    return ended.result()
                except RewardError:
                    raise
                except ProcessExpired as error:
                    raise self._error("ended its process", completion, task) from error
                except TimeoutError:  # raised by the pool of processes: errors of the function are `RewardError`
                    pass
                except Exception as cause:  # the pool is broken; the next call makes another
                    self._drop_processes()
                    why = f"could not be called ({type(cause).__name__}: {cause})"
                    raise self._error(why, completion, task) from cause
            raise self._error(f"took longer than reward.time_limit_s, {limit_s:.3g} s,", completion, task)

    def _error(self, what: str, completion: str, task: Mapping[str, Any]) -> RewardError:
        name = getattr(self._judge, "name", "the reward function")
        prompt = task.get("prompt")
        return RewardError(f"{name} {what} for prompt {prompt!r} and completion {completion!r}.", part=_PART)

    def _begin(self, completion: str, task: Mapping[str, Any]) -> Future[float]:
        if self._config.run_in == "thread":
            return self._threads.submit(self._judge, completion, task)
        if self._processes is None:
            context = multiprocessing.get_context("spawn")
            self._processes = ProcessPool(
                self._config.workers, initializer=_begin_process, initargs=[self._judge], context=context
            )
        calling: Future[float] = self._processes.schedule(
            _judged_here, [completion, dict(task)], timeout=self._config.time_limit_s
        )
        return calling

    def _drop_processes(self) -> None:
        """Stop the pool of processes, if there is one, without waiting for it; the next call makes another."""
        pool, self._processes = self._processes, None
        if pool is not None:
            self._threads.submit(pool.stop)

    def close(self) -> None:
        """Stop threads and processes, also in the middle of calls. Idempotent."""
        self._threads.shutdown()
        if self._processes is not None:
            self._processes.stop()  # type: ignore[no-untyped-call]  # pebble is typed in part
            self._processes.join(_CLOSE_S)


def no_reward(completion: str, task: Mapping[str, Any]) -> float:  # noqa: ARG001 - a reward function's arguments
    """Stand for the reward function of a run that has none. Raises `RewardError`."""
    raise RewardError(
        "the environment asks for a reward, and the run has no reward function.",
        part=_PART,
        hint="Set reward.function to 'module:function'.",
    )


def _begin_process(judge: Judge) -> None:
    """Set the reward function of this process, which is one of the pool.

    On Linux the kernel kills the process when its parent ends (``prctl(2)``). Elsewhere it ends after its current call.
    """
    _judges[:] = [judge]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _judged_here(completion: str, task: Mapping[str, Any]) -> float:
    return _judges[0](completion, task)


def _awaited(value: Awaitable[object], limit_s: float | None) -> object:
    running = asyncio.run_coroutine_threadsafe(_as_coroutine(value), _event_loop())
    try:
        return running.result(limit_s)
    except TimeoutError:
        running.cancel()
        raise


async def _as_coroutine(value: Awaitable[object]) -> object:
    return await value


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all ``async`` reward functions in this process: connections they keep open belong to one loop."""
    with _one_at_a_time:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="weightlane-reward-loop", daemon=True).start()
        return _loops[0]


def _as_float(value: object) -> float | None:
    """Return `value` as a float if it is a number (numpy and torch scalars included), else None."""
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        inner = item()
        return float(inner) if isinstance(inner, numbers.Real) else None
    return None
