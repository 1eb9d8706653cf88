"""Runs of `weightlane train` in these environments: a reward rises, the engine's tokens are trained, failures cost samples."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from episodes import MOST_S
from openenv_server import BROKEN_SEED
from weightlane_environments.tasks import write_tasks

EXAMPLE = Path(__file__).parents[4] / "examples/reasoning_gym"
TOKENS = 1536
"""Tokens of an episode: a token is a byte, and games explain themselves."""
TASKS, BROKEN = 8, 9
"""Training tasks, as many as a step has, and the number of one that cannot be played; the first four are held out."""
CONFIG = """
[model]
path = "model"
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
[loop]
steps = 2
max_staleness = 0
evaluate_tasks = 4
max_failed_share = 0.9
[algorithm]
group_size = 2
prompts_per_step = 8
max_new_tokens = 6
[trainer]
ranks = 1
cpus_per_rank = 0.5
[rollout]
dtype = "float32"
max_num_seqs = 16
concurrency = 16
kv_cache_memory_bytes = 67108864
cpus_per_rank = 0.5
[rollout.extra_engine_args]
distributed_executor_backend = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for Ray, whose sockets need a short path."""
    path = Path(tempfile.mkdtemp(prefix="wl-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def train(config: Path, run_dir: Path, temporary: Path, **settings: object) -> list[dict[str, Any]]:
    """Run `weightlane train` with this Python. Returns what it measured."""
    command = "from weightlane.cli.main import main; main()"
    given = [part for key, value in {"run.dir": run_dir, **settings}.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(temporary), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", command, "train", str(config), "--plain", *given],
        env=environment,
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=4 * MOST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "training_step"]


def test_the_example_learns(tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task"
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(task)]
    subprocess.run(prepare, check=True, timeout=2 * MOST_S, stdout=subprocess.DEVNULL)
    material = {
        "model.path": task / "model",
        **{f"data.{name}": task / f"{name}.jsonl" for name in ("train", "heldout")},
    }
    events = train(EXAMPLE / "spell_backward.toml", tmp_path / "run", temporary, **material)
    accuracies = [event["accuracy"] for event in events if "accuracy" in event]
    steps = steps_of(events)
    with capsys.disabled():
        sys.stdout.write(f"\nheld-out reward {accuracies}\n")
    assert accuracies[-1] > accuracies[0] + 0.05
    assert steps[0]["approx_kl"] < 1e-6, "other tokens were trained than the engine wrote"
    assert all(step["environment/answered"] == 1.0 for step in steps)


@pytest.fixture
def material(tmp_path: Path) -> Path:
    """A model of random weights with room for games, and its tokenizer."""
    made = runpy.run_path(str(EXAMPLE.parent / "arithmetic/prepare.py"))
    tokenizer = made["make_tokenizer"]()
    tokenizer.model_max_length = TOKENS
    made["make_model"](tokenizer, TOKENS).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_run_of_games_pays_for_a_broken_task_with_its_samples(material: Path, temporary: Path) -> None:
    def make(number: int) -> dict[str, Any]:
        game = "Nim-v9" if number == BROKEN else "2048-v0-ultra-easy"
        return {"prompt": f"{game} {number}", "answer": "", "game": game, "seed": number}

    check_run(material, temporary, make, {"processes": 2}, says="TextArena has no game 'Nim-v9'")


def test_a_run_over_a_server_pays_for_a_broken_episode_with_its_samples(
    material: Path, temporary: Path, start_server: Callable[[int], str]
) -> None:
    def make(number: int) -> dict[str, Any]:
        seed = BROKEN_SEED if number == BROKEN else number
        return {"prompt": f"seed {seed}", "answer": "", "reset": {"seed": seed}}

    options = {"url": start_server(16), "action_field": "guess", "observation_field": "hint"}
    check_run(material, temporary, make, options, says="this episode is broken")


def check_run(
    folder: Path, temporary: Path, make: Callable[[int], dict[str, Any]], options: dict[str, Any], *, says: str
) -> None:
    """A short run has several turns, trains the engine's tokens, and loses the samples of task `BROKEN` only."""
    write_tasks(map(make, range(4 + TASKS)), heldout=4, out=folder)
    name = "openenv" if "url" in options else "textarena"
    given = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    config = folder / "run.toml"
    config.write_text(f'{CONFIG}[environment]\nname = "{name}"\nmax_turns = 3\n[environment.options]\n{given}')
    steps = steps_of(train(config, folder / "run", temporary))
    assert len(steps) == 2
    assert steps[0]["approx_kl"] < 1e-6
    assert all(step["turns"] > 1.5 and step["read_between_turns"] > 10 for step in steps)
    failures = [json.loads(line) for line in (folder / "run/failures.jsonl").read_text().splitlines()]
    assert failures
    assert all(failure["kind"] == "environment" and says in failure["error"] for failure in failures)
