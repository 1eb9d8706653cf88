"""The user's reward function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.rewards import Reward

MODULE = "user_reward_of_a_test"
SOURCE = """
import math
import torch
threshold = 0.5
class Judges:
    @staticmethod
    def length(completion, task):
        return len(completion)
def match(completion, task): return completion == task["answer"]
def tensor(completion, task): return torch.tensor(0.25)
def nan(completion, task): return math.nan
def infinite(completion, task): return -math.inf
def text(completion, task): return "1.0"
def nothing(completion, task): pass
def many(completion, task): return torch.tensor([1.0, 2.0])
def broken(completion, task): raise KeyError("solution")
"""
TASK = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop(MODULE, None)


@pytest.mark.parametrize(
    ("function", "completion", "value"),
    [("match", "2", 1.0), ("match", "3", 0.0), ("tensor", "", 0.25), ("Judges.length", "abc", 3.0)],
)
def test_numbers_of_any_kind_become_floats(folder: Path, function: str, completion: str, value: float) -> None:
    found = Reward(f"{MODULE}:{function}", [folder])(completion, TASK)
    assert (type(found), found) == (float, value)


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ("nan", "returned nan"),
        ("infinite", "returned -inf"),
        ("text", "returned '1.0'"),
        ("nothing", "returned None"),
        ("many", f"returned {torch.tensor([1.0, 2.0])!r}"),
        ("broken", "raised KeyError: 'solution'"),
    ],
)
def test_what_is_not_a_finite_number_is_refused_with_function_prompt_and_value_or_error(
    folder: Path, function: str, shown: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Reward(f"{MODULE}:{function}", [folder])("7", TASK)
    assert f"{MODULE}:{function} {shown} for prompt '1+1=' and completion '7'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError) == (function == "broken")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("match", "'match' is not of the form 'module:function'"),
        (":match", "':match' is not of the form"),
        (f"{MODULE}:", "is not of the form"),
        ("no_such_module_here:f", "could not be imported: ModuleNotFoundError: No module named 'no_such_module_here'"),
        (f"{MODULE}:matsch", f"{MODULE} has no 'matsch'"),
        (f"{MODULE}:threshold", f"'{MODULE}:threshold' is a float, not a function"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(folder: Path, function: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Reward(function, [folder])
    assert problem in str(caught.value)


def test_the_first_folder_of_the_search_path_wins(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{MODULE}.py").write_text("def match(completion, task): return 9\n")
    assert Reward(f"{MODULE}:match", [other, folder])("2", TASK) == 9.0
