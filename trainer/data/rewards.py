"""The user's reward function: finding it, calling it, beside everything else, and refusing what is not a number."""

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
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads

from ..config import RewardConfig
from .named_function import function_named

_PART = "reward"
_CLOSE_S = 5.0
_PR_SET_PDEATHSIG = 1
_LARGEST = 1e30
"""Rewards are squared, and the squares summed."""
_PROCESS_START_S = 120.0
"""How much longer than its limit a call may take whose process has to be started first."""
_one_at_a_time = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
Judge = Callable[[str, Mapping[str, Any]], float]
"""Judges a completion of a task; raises `RewardError` when it can't."""
_judges: list[Judge] = []
"""In a process of the pool: what it judges by."""


class Reward:
    """A reward function given as ``"module:function"``, called as ``function(completion: str, task: Mapping) -> float``.

    It may be an ``async`` function, too. Another process can be handed this object, and imports the function anew.

    Args:
        function: module and function; dots after the colon reach into classes.
        search_path: folders in which the module is looked for before installed packages; put at the front of ``sys.path``
            in this order, and left there because the function may import its neighbours later.
        time_limit_s: after how long a call of an ``async`` function is cancelled; None for never.

    Raises `ConfigError` when the name is malformed, or nothing callable can be imported under it.
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
        """Judge `completion`.

        Raises `RewardError`, naming the function, the prompt and the value, when the function raises or does not return a
        finite real number.
        """
        prompt = task.get("prompt")
        try:
            value = self._function(completion, task)
            if inspect.isawaitable(value):
                value = _awaited(value, self._time_limit_s)
            number = _as_float(value)
        except (Exception, SystemExit) as cause:  # code that is judged may end with `exit()`
            raise RewardError(
                f"{self.name} raised {type(cause).__name__}: {cause} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint="Fix the reward function.",
            ) from cause
        if number is None or not abs(number) <= _LARGEST:  # NaN is not
            raise RewardError(
                f"{self.name} returned {value!r} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint=f"A reward must be a number, and at most {_LARGEST:.0e}.",
            )
        return number


class RewardPool:
    """Calls a reward function beside the event loop, several times at once, for a limited time each.

    What it runs in is its own: a slow function keeps nobody waiting but the samples that it judges. A thread that does not come
    back is left to itself; a process is killed, and another one takes its place.

    Args:
        judge: The function. For processes it must be picklable, as `Reward` is.
        config: How many calls at once, where, and for how long.
    """

    def __init__(self, judge: Judge, config: RewardConfig) -> None:
        self._judge = judge
        self._config = config
        self._free = asyncio.Semaphore(config.workers)
        # One that is stuck does not count any more: the semaphore says how many work.
        self._threads = DaemonThreads(sys.maxsize, "weightlane-reward")
        self._processes: ProcessPool | None = None

    async def __call__(self, completion: str, task: Mapping[str, Any]) -> float:
        """The reward of `completion`. Raises `RewardError`, also when judging it takes longer than it may."""
        async with self._free:
            limit_s = self._config.time_limit_s
            try:
                ended = asyncio.wrap_future(self._begin(completion, task))
            except Exception as cause:
                self._drop_processes()
                raise self._error(f"could not be called ({type(cause).__name__}: {cause})", completion, task) from cause
            # A process is killed at its limit, and says so; that takes a moment, and so does its start.
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
                except TimeoutError:  # of the pool of processes: what the function raises is a `RewardError`
                    pass
                except Exception as cause:  # the pool is broken, and another one takes its place
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
        """End the pool of processes, if there is one, without waiting for it; the next call makes another."""
        pool, self._processes = self._processes, None
        if pool is not None:
            self._threads.submit(pool.stop)

    def close(self) -> None:
        """End it, whatever is under way. Idempotent."""
        self._threads.shutdown()
        if self._processes is not None:
            self._processes.stop()  # type: ignore[no-untyped-call]  # pebble is typed in part
            self._processes.join(_CLOSE_S)


def _begin_process(judge: Judge) -> None:
    """Get a process of the pool ready."""
    _judges[:] = [judge]
    _end_with_the_run()


def _judged_here(completion: str, task: Mapping[str, Any]) -> float:
    return _judges[0](completion, task)


def _end_with_the_run() -> None:
    """Have the kernel end this process with the one that started it, however that ends and whatever this one is busy with.

    Linux only (``prctl(2)``); elsewhere the processes of a run that is killed end with the calls that they are in.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
    """The one that ``async`` reward functions of this process run in: what they keep open belongs to one loop."""
    with _one_at_a_time:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="weightlane-reward-loop", daemon=True).start()
        return _loops[0]


def _as_float(value: object) -> float | None:
    """`value` as a float if it is a number (numpy and torch scalars included), else None."""
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        inner = item()
        return float(inner) if isinstance(inner, numbers.Real) else None
    return None
