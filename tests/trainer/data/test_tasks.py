"""Task files and the order in which tasks are taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import DataConfig
from weightlane.trainer.data.tasks import Task, TaskStream, load_splits, load_tasks


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_prompt_answer_and_every_other_key_reach_the_task(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"q": "1+1=", "a": 2, "level": "easy"}', "", '{"q": "é", "a": "x"}')
    tasks = load_tasks(path, "q", "a")
    assert tasks == [Task("1+1=", 2, {"level": "easy"}), Task("é", "x", {})]
    assert tasks[0].as_mapping() == {"prompt": "1+1=", "answer": 2, "level": "easy"}
    with pytest.raises(ConfigError, match="are both 'q'"):
        load_tasks(path, "q", "q")
    sized = write(tmp_path / "s.jsonl", '{"prompt": "1+1=", "answer": 2, "n": 4}', '{"prompt": "1+2=", "answer": 3}')
    assert [task.group_size for task in load_tasks(sized, group_size_key="n")] == [4, 0]
    assert [task.group_size for task in load_tasks(sized)] == [0, 0]
    with pytest.raises(ConfigError, match="group_size_key is 'answer', the key of the prompt or the answer"):
        load_tasks(sized, group_size_key="answer")
    for wrong in ("1", "true", '"4"'):
        sized = write(tmp_path / "s.jsonl", f'{{"prompt": "1+1=", "answer": 2, "n": {wrong}}}')
        with pytest.raises(
            ConfigError, match=r"line 1: 'n' is .*data.group_size_key names a whole number of 2 or more"
        ):
            load_tasks(sized, group_size_key="n")


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    for line, problem in (
        ('{"prompt": "a", "answer"', "line 2: not valid JSON: Expecting ':' delimiter at column"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "line 2: JSON that cannot be read: Exceeds the limit"),
        ('{"prompt": "a", "answer": ' + "[" * 100_000 + "}", "line 2: JSON that cannot be read: maximum recursion"),
        ('["a", "b"]', "line 2: expected a JSON object, found list"),
        ('{"prompt": "a", "answer": null}', "line 2: the key 'answer' is missing or null. The line has 'prompt'"),
        ('{"prompt": "a", "answer": 1, "messages": []}', "line 2: 'messages' is neither the prompt nor the answer"),
        ('{"prompt": 3, "answer": "a"}', "line 2: 'prompt' must be a non-empty string, not 3"),
    ):
        path = write(tmp_path / "t.jsonl", '{"prompt": "a", "answer": "b"}', line)
        with pytest.raises(ConfigError) as caught:
            load_tasks(path)
        assert f"{path}, {problem}" in str(caught.value)


def test_files_that_are_missing_empty_or_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, problem in (
        (tmp_path / "none.jsonl", "there is no task file"),
        (write(tmp_path / "empty.jsonl", "", "  "), "holds no task"),
        (tmp_path / "binary.jsonl", "not UTF-8 text"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_tasks(path)


def test_a_prompt_in_both_splits_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *(json.dumps({"prompt": p, "answer": "1"}) for p in "abc"))
    heldout = write(tmp_path / "heldout.jsonl", *(json.dumps({"prompt": p, "answer": "2"}) for p in "cd"))
    with pytest.raises(ConfigError, match=r"1 held-out prompts of .*heldout.jsonl are also in .*train.jsonl, 'c'"):
        load_splits(DataConfig(train=train, heldout=heldout), str)
    write(heldout, '{"prompt": "d", "answer": "2"}')
    assert {
        name: len(each) for name, each in load_splits(DataConfig(train=train, heldout=heldout), str)[1].items()
    } == {"": 1}
    shared = write(tmp_path / "shared.jsonl", json.dumps({"prompt": "b", "answer": "1"}))
    sets = {"new": heldout, "old": shared}
    with pytest.raises(ConfigError, match=r"1 held-out prompts of .*shared.jsonl are also in .*train.jsonl, 'b'"):
        load_splits(DataConfig(train=train, heldout=sets), str)
    write(shared, *(json.dumps({"prompt": p, "answer": "1"}) for p in "ef"))
    found, held = load_splits(DataConfig(train=train, heldout=sets), str)
    assert [task.prompt for task in found] == ["a", "b", "c"]
    assert {name: [task.prompt for task in each] for name, each in held.items()} == {"new": ["d"], "old": ["e", "f"]}
    with pytest.raises(ValidationError, match="pattern"):
        DataConfig(train=train, heldout={"a name": heldout})


TASKS = [Task(f"p{index}", index) for index in range(7)]


def test_every_epoch_holds_every_task_once_in_an_order_of_its_own() -> None:
    epochs = [[task.prompt for task in TaskStream(TASKS, seed=1).take(21)][start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(task.prompt for task in TASKS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert TaskStream(TASKS, seed=1).take(21) == TaskStream(TASKS, seed=1).take(21)
    assert TaskStream(TASKS, seed=1).take(21) != TaskStream(TASKS, seed=2).take(21)


def test_a_restored_stream_continues_where_it_stood_and_a_position_of_another_run_is_refused() -> None:
    for taken in (0, 3, 7, 18):
        stream, resumed = TaskStream(TASKS, seed=3), TaskStream(TASKS, seed=3)
        stream.take(taken)
        resumed.restore(json.loads(json.dumps(stream.state())))
        assert resumed.take(20) == stream.take(20)
    moved = [replace(task, place="elsewhere") for task in TASKS]
    TaskStream(moved, seed=3).restore(TaskStream(TASKS, seed=3).state())
    today, tomorrow = (Task(f"It is day {day}. 1+1", 2, {"messages": [{"role": "user"}]}) for day in (1, 2))
    TaskStream([tomorrow], seed=3).restore(TaskStream([today], seed=3).state())  # the template writes the date
    TaskStream(TASKS[::-1], seed=3).restore(TaskStream(TASKS, seed=3).state(), may_change=True)
    state = TaskStream(TASKS, seed=3).state()
    for stream, wrong, problem in (
        (TaskStream(TASKS, seed=4), state, "seed = 3, this one has 4"),
        (TaskStream(TASKS[:6], seed=3), state, "tasks = 7, this one has 6"),
        (TaskStream(TASKS, seed=3), {**state, "position": 8}, "not valid"),
        (TaskStream([*TASKS[:-1], Task("p6", 7)], seed=3), state, 'other content.*data.changed="accept"'),
    ):
        with pytest.raises(ConfigError, match=problem):
            stream.restore(wrong)


def test_prompts_may_be_conversations(tmp_path: Path) -> None:
    def as_chat(messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"

    talk = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    path = write(
        tmp_path / "t.jsonl", json.dumps({"prompt": talk, "answer": 2}), json.dumps({"prompt": "2+2=", "answer": 4})
    )
    first, second = load_tasks(path, as_chat=as_chat)
    assert (first.prompt, second.prompt) == ("<system>Add.<user>1+1=<assistant>", "<user>2+2=<assistant>")
    assert first.as_mapping() == {"prompt": first.prompt, "answer": 2, "messages": talk}
    for bad in ([], [{"role": "user"}], [{"role": "user", "content": 3}], {"role": "user", "content": "x"}, 7):
        write(path, json.dumps({"prompt": bad, "answer": 1}))
        with pytest.raises(ConfigError, match="line 1: 'prompt'"):
            load_tasks(path, as_chat=as_chat)
    with pytest.raises(ConfigError, match="must be a non-empty string"):
        load_tasks(write(path, json.dumps({"prompt": talk, "answer": 2})))
