"""The environment ``reasoning-gym`` beside the library itself: tasks, scores, and what replies can do that it evaluates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from episodes import MOST_S, Scripted, environment, played
from weightlane_environments.library_process import LibraryOptions, LibraryProcess
from weightlane_environments.tasks import problem_tasks, write_tasks

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, EpisodeError, WorkerDiedError
from weightlane.trainer.loop.environments import Verdict

SEED, SIZE = 5, 3


def task(dataset: str, index: int = 0, **options: Any) -> dict[str, Any]:
    return problem_tasks(dataset, options, seed=SEED, size=SIZE, template="{question}")[index]


def test_every_dataset_gives_the_librarys_own_problems_and_scores() -> None:
    judged = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reasoning_gym_scores.py")), str(SEED), str(SIZE)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
        capture_output=True,
        timeout=4 * MOST_S,
    )
    scores = json.loads(judged.stdout)
    episodes = []
    for name, index, _, answer, given, _ in scores:
        reply = "no answer" if given is None else f"<answer>0</answer> No: <answer> {given}\n</answer>"
        spec = {"dataset": name, "index": index, "options": {"seed": SEED, "size": SIZE}}
        episodes.append(({"answer": answer, "reasoning_gym": spec}, Scripted(reply)))
    verdicts = played(environment("reasoning-gym", call_time_limit_s=MOST_S), *episodes)
    for (name, _, _, _, given, score), verdict in zip(scores, verdicts, strict=True):
        assert isinstance(verdict, Verdict), (name, given, verdict)
        assert verdict.reward == (score or 0.0), (name, given)
        assert verdict.metrics == {"answered": float(given is not None), "unscorable": float(score is None)}
    assert len({name for name, *_ in scores}) > 100
    assert len({score for *_, score in scores}) > 5
    assert 0 < sum(score is None for *_, score in scores) < 20
    name, index, question, *_ = scores[-1]
    assert task(name, index)["prompt"] == question


def test_without_a_tag_the_reply_is_the_answer_and_the_model_reads_the_task_itself() -> None:
    given = task("spell_backward", min_word_len=5, max_word_len=5)
    right, wrong = Scripted(given["answer"] + "\n"), Scripted("zz" + given["answer"][2:])
    verdicts = played(environment("reasoning-gym", answer_tag=""), (given, right), (given, wrong))
    assert [verdict.reward for verdict in verdicts] == [1.0, pytest.approx(0.6)]
    assert right.read == [None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reasoning_gym": None}, "has no key reasoning_gym"),
        ({"dataset": "chain_summ"}, "no dataset 'chain_summ'. It has ab, "),
        ({"options": {"seed": 1, "terms": 3}}, "does not take these options: .*terms"),
        ({"options": {"size": 1}}, "have no seed"),
        ({"answer": "other"}, "another answer than its task file"),
    ],
)
def test_a_task_without_a_problem_says_what_is_wrong_with_it(changes: dict[str, Any], says: str) -> None:
    given = task("chain_sum")
    for key, value in changes.items():
        (given if key in given else given["reasoning_gym"])[key] = value
    fine = task("chain_sum", 1)
    right = Scripted(f"<answer>{fine['answer']}</answer>")
    failed, other = played(environment("reasoning-gym"), (given, Scripted("17")), (fine, right))
    assert isinstance(failed, ConfigError)
    with pytest.raises(ConfigError, match=says):
        raise failed
    assert isinstance(other, Verdict)
    assert other.reward == 1.0


def test_a_reply_that_the_dataset_evaluates_costs_its_own_episode_only() -> None:
    """`string_insertion` calls `eval` on replies."""
    hostile = {
        "exit()": EpisodeError,
        "[0 for _ in iter(int, 1)]": DeadlineExceededError,  # Python can interrupt it
        "9**9**9**9": DeadlineExceededError,  # and not this one
        "__import__('os')._exit(0)": WorkerDiedError,
        "print('{}', flush=True)": None,
        "input()": None,
        "'x' * 10**12": None,
    }
    given = task("string_insertion")
    episodes = []
    for reply in hostile:
        episodes += [(given, Scripted(reply)), (given, Scripted(given["answer"]))]
    results = played(environment("reasoning-gym", answer_tag="", call_time_limit_s=15), *episodes)
    for reply, result, after in zip(hostile, results[::2], results[1::2], strict=True):
        if expected := hostile[reply]:
            assert isinstance(result, expected), (reply, result)
            assert "environment reasoning-gym" in str(result)
        else:
            assert isinstance(result, Verdict), (reply, result)
            assert result.reward == 0.0
        assert isinstance(after, Verdict), (reply, after)
        assert after.reward == 1.0, reply


def test_task_files_share_no_prompt_and_the_command_says_how_many_there_are(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightlane_environments.tasks", "reasoning-gym", "chain_sum"]
    options = [part for key in ("terms", "digits") for part in ("--option", f"max_{key}=2")]
    sizes = ["--train", "300", "--heldout", "50", "--out", str(tmp_path), "--template", "Q: {question} A:"]
    done = subprocess.run([*command, *options, *sizes], check=True, capture_output=True, text=True, timeout=MOST_S)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    unknown = subprocess.run(
        [*command[:-1], "no_dataset", *sizes], check=False, capture_output=True, text=True, timeout=MOST_S
    )
    assert (unknown.returncode, unknown.stderr.startswith("error: ")) == (2, True)
    assert f"{len(train)} tasks for training, {len(heldout)} held out" in done.stdout
    prompts = [each["prompt"] for each in [*train, *heldout]]
    assert len(set(prompts)) == len(prompts)
    assert len(heldout) > 45
    assert 200 < len(train) <= 300
    assert all(prompt.startswith("Q: State") and prompt.endswith("= A:") for prompt in prompts)
    assert write_tasks(({"prompt": str(number % 4)} for number in range(7)), heldout=3, out=tmp_path) == (1, 3)


def test_a_missing_library_is_said_before_the_run() -> None:
    process = LibraryProcess("nowhere", library="Nowhere", name="nowhere", options=LibraryOptions())
    with pytest.raises(
        ConfigError, match=r"Nowhere cannot be imported.*pip install 'weightlane-environments\[nowhere\]'"
    ):
        process.call_once("version")
