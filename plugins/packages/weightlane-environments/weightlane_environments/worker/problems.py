"""reasoning-gym's problems: made from a dataset's name, its options and an index, and scored by the dataset's own function."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from .refusal import RefusedError

_WRITE = "Write task files by python -m weightlane_environments.tasks reasoning-gym DATASET."


def version() -> str:
    """Return reasoning-gym's version."""
    return str(reasoning_gym.__version__)


def problems(specs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return question and answer of each problem.

    A spec has ``dataset``, ``index``, and ``options`` with ``seed`` and ``size``. Raises `RefusedError` if one names no problem.
    """
    entries = [_entry(json.dumps(spec))[1] for spec in specs]
    return [(entry["question"], _answer(entry)) for entry in entries]


def score(spec: Mapping[str, Any], answer: str, reply: str, tag: str) -> tuple[float, dict[str, float]]:
    """Return the score of `reply` to the problem of `spec`, and metrics. Its answer is in ``<tag>``, or all of it without `tag`.

    Some datasets raise an error for an answer that is none of theirs. Its score is 0: the model has to learn from it.

    Raises `RefusedError` if the problem's answer is not `answer`, which its task file was made with.
    """
    dataset, entry = _entry(json.dumps(spec))
    if answer != _answer(entry):
        raise RefusedError(
            f"problem {spec['index']} of {spec['dataset']} has another answer than its task file.",
            f"Make the file again with this version of reasoning-gym, {version()}.",
        )
    given = extract_answer(reply, tag_name=tag) if tag else reply.strip()
    try:
        points, unscorable = float(dataset.score_answer(answer=given, entry=entry)), False
    except Exception:  # noqa: BLE001 - whatever a dataset raises
        points, unscorable = 0.0, True
    return points, {"answered": float(given is not None), "unscorable": float(unscorable)}


def _answer(entry: Mapping[str, Any]) -> str:
    answer = entry["answer"]
    return "" if answer is None else str(answer)


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    if name not in DATASETS:
        raise RefusedError(f"reasoning-gym has no dataset {name!r}.", f"It has {', '.join(sorted(DATASETS))}.")
    given = json.loads(options)
    if not isinstance(given.get("seed"), int):
        raise RefusedError("the options of the dataset have no seed.", _WRITE)
    try:
        return reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        raise RefusedError(
            f"the dataset {name!r} does not take these options: {error}.", f"They are {options}."
        ) from error


@lru_cache(maxsize=1024)
def _entry(spec: str) -> tuple[Any, dict[str, Any]]:
    """Return dataset and problem. It is made again here, since its metadata may not survive JSON as `score_answer` needs it."""
    given = json.loads(spec)
    try:
        name, index, options = given["dataset"], given["index"], given["options"]
    except (KeyError, TypeError) as error:
        raise RefusedError("the task names no problem of reasoning-gym.", _WRITE) from error
    dataset = _dataset(name, json.dumps(options))
    # Some datasets also draw from the generators that the whole process shares.
    random.seed(spec)
    np.random.seed(index)
    return dataset, dataset[index]
