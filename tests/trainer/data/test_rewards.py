"""The user's reward function."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import fork_server
import psutil
import pytest
import torch
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError, RewardError
from weightlane.trainer.config import RewardConfig
from weightlane.trainer.data.rewards import Reward, RewardPool
from weightlane.trainer.data.written_text import WrittenText

fork_server.install()

MODULE = "user_reward_of_a_test"
SOURCE = """
import asyncio
import ctypes
import math
import os
import threading
import time
threshold = 0.5
class Judges:
    @staticmethod
    def length(completion, task):
        return len(completion)
def match(completion, task): return completion == task["answer"]
def tensor(completion, task):
    import torch
    return torch.tensor(0.25)
def nan(completion, task): return math.nan
def text(completion, task): return "1.0"
def huge(completion, task): return -10 ** 400
def large(completion, task): return 1e39
def leaves(completion, task): raise SystemExit(0)
def cancels(completion, task): raise asyncio.CancelledError
async def never(completion, task): await asyncio.sleep(10_000)
def many(completion, task):
    import torch
    return torch.tensor([1.0, 2.0])
def broken(completion, task): raise KeyError("solution")
async def later(completion, task):
    await asyncio.sleep(0)
    loops.add(id(asyncio.get_running_loop()))
    return len(loops)
loops = set()
def hangs(completion, task):
    if completion == "hang":
        release.wait()
    return 1.0
release = threading.Event()
def calls_native_code(completion, task):
    if completion == "hang":
        ctypes.PyDLL(None).sleep(10_000)  # it holds the interpreter
    if completion == "end":
        os._exit(3)
    return completion.token_ids[1] + completion.logprobs[0] if completion == "tokens" else 1.0
def sleeps(completion, task):
    if completion == "sleep":
        time.sleep(10_000)
    return os.getpid()
"""
TASK = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop(MODULE, None)


def test_numbers_of_any_kind_become_floats(folder: Path) -> None:
    """The first folder of the search path that has the module wins."""
    (folder / "later").mkdir()
    (folder / "later" / f"{MODULE}.py").write_text("def match(completion, task): return 9\n")
    for function, completion, value in (
        ("match", "2", 1.0),
        ("match", "3", 0.0),
        ("tensor", "", 0.25),
        ("Judges.length", "abc", 3.0),
    ):
        found = Reward(f"{MODULE}:{function}", [folder, folder / "later"])(completion, TASK)
        assert (type(found), found) == (float, value)


def test_whatever_a_reward_does_costs_its_completion_only_and_function_prompt_and_value_or_error_are_said(
    folder: Path,
) -> None:
    """Code that a model wrote may end the process, and numbers that it wrote may be too large for anybody."""
    for function, shown in (
        ("nan", "returned nan"),
        ("text", "returned '1.0'"),
        ("many", f"returned {torch.tensor([1.0, 2.0])!r}"),
        ("large", "returned 1e+39"),
        ("broken", "raised KeyError: 'solution'"),
        ("leaves", "raised SystemExit: 0"),
        ("cancels", "raised CancelledError: "),
        ("huge", "raised OverflowError: int too large to convert to float"),
        ("never", "raised TimeoutError: "),
    ):
        with pytest.raises(RewardError) as caught:
            Reward(f"{MODULE}:{function}", [folder], time_limit_s=0.05)("7", TASK)
        assert f"{MODULE}:{function} {shown} for prompt '1+1=' and completion '7'" in str(caught.value)


def test_a_function_that_cannot_be_had_is_refused(folder: Path) -> None:
    for function, problem in (
        ("match", "'match' is not of the form 'module:function'"),
        ("no_such_module_here:f", "could not be imported: ModuleNotFoundError: No module named 'no_such_module_here'"),
        (f"{MODULE}:matsch", f"{MODULE} has no 'matsch'"),
        (f"{MODULE}:threshold", f"'{MODULE}:threshold' is a float, not a function"),
    ):
        with pytest.raises(ConfigError) as caught:
            Reward(function, [folder])
        assert problem in str(caught.value)


class Refusing(ThreadPoolExecutor):
    """The event loop's own executor: what else the program does depends on it."""

    def submit(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("rewards have threads of their own")


def judged(reward: Reward, *completions: str, **settings: Any) -> list[float | BaseException]:
    """Judge `completions` in one reward pool at the same time; return their rewards or errors."""

    async def judge() -> list[float | BaseException]:
        asyncio.get_running_loop().set_default_executor(Refusing())
        with closing(RewardPool(reward, RewardConfig(function=reward.name, **settings))) as pool:
            calls = (pool(completion, TASK) for completion in completions)
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(judge(), HANG_S))


def test_async_functions_share_one_event_loop_which_is_not_the_callers(folder: Path) -> None:
    assert judged(Reward(f"{MODULE}:later", [folder]), *"abcd") == [1.0] * 4


def test_a_reward_that_hangs_costs_its_completion_and_no_other_waits_for_it(folder: Path) -> None:
    reward = Reward(f"{MODULE}:hangs", [folder])
    try:
        first, *others = judged(reward, "hang", *"abcdef", workers=1, time_limit_s=2.5)
    finally:
        sys.modules[MODULE].release.set()
    late = "hangs took longer than reward.time_limit_s, 2.5 s, for prompt '1+1=' and completion 'hang'"
    assert isinstance(first, RewardError)
    assert f"{MODULE}:{late}" in str(first)
    assert others == [1.0] * 6


def test_a_process_that_hangs_in_native_code_is_killed_and_one_that_ends_is_replaced(folder: Path) -> None:
    reward = Reward(f"{MODULE}:calls_native_code", [folder])
    written = WrittenText("tokens", [3, 4], [-0.5, -0.25])
    late, gone, well, told = judged(
        reward, "hang", "end", "well", written, run_in="process", workers=1, time_limit_s=5.0
    )
    assert isinstance(late, RewardError)
    assert "took longer than" in str(late)
    assert isinstance(gone, RewardError)
    assert "ended its process" in str(gone)
    assert (well, told) == (1.0, 3.5), "a completion has its tokens there, too"


KILLED = """
import asyncio
import sys
from pathlib import Path

from weightlane.trainer.config import RewardConfig
from weightlane.trainer.data.rewards import Reward, RewardPool


async def main() -> None:
    reward = Reward("{module}:sleeps", [Path("{folder}")])
    pool = RewardPool(reward, RewardConfig(function=reward.name, run_in="process", workers=1))
    print(int(await pool("who", {{}})), flush=True)
    await pool("sleep", {{}})


if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_processes_of_a_run_that_is_killed_end_with_it(folder: Path, children: Any) -> None:
    script = folder / "killed.py"
    script.write_text(KILLED.format(module=MODULE, folder=folder))
    child = children.start([str(script)], forked=True, stdout=subprocess.PIPE)
    worker = int(child.stdout.readline())
    os.kill(worker, 0)  # it lives, and sleeps
    child.kill()
    wait_until(lambda: not psutil.pid_exists(worker), "end of the process that judged")
