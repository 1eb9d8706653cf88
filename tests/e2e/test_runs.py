"""Whole runs of `weightlane train`, from an FSDP2 trainer in Ray to vLLM: their files, a resume, and an end by Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from run_process import FinishedRun, StartRun, events_of
from safetensors.torch import load_file
from saved_states import saved_tensors
from tiny_models import load_tensors
from tiny_run import BETAS, GROUP_SIZE, IN_ENGINE, LEARNING_RATE, PROMPTS_PER_STEP, Material
from trace_format import load
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from weightlane.cli.main import app
from weightlane.cli.report.run_record import read_record

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DOCS, RECIPES = ROOT / "docs", ROOT / "examples" / "gsm8k"

CONSTANT_REWARD = """
import time
from pathlib import Path
from rewards_of_test import remember

SAVED = Path({saved!r})

def constant(completion, task):
    # From step 7 on it takes up to forty seconds, in which the test ends the run.
    remember(task)
    for _ in range(800):
        if not SAVED.exists():
            break
        time.sleep(0.05)
    return 0.5
"""
EPSILON = 1e-8
"""AdamW's default."""


def check_files(run_dir: Path, steps: int) -> None:
    """Check the files that every finished run must leave."""
    summary = json.loads((run_dir / "summary.json").read_text())
    sync = summary["sync"]
    for name in ("trainer_blocked_s", "export_s", "transfer_s", "install_s", "rollout_blocked_s", "latency_s"):
        assert 0.0 < sync[name]["p50"] <= sync[name]["p95"] <= sync[name]["max"]
    assert sync["lost_per_step_s"].keys() == {"trainer", "rollout", "synchronous_update"}
    assert all(seconds > 0.0 for seconds in sync["lost_per_step_s"].values())
    assert (summary["replicas_lost"], summary["replicas_replaced"]) == (0, 0)
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    assert 0.0 <= summary["overlap_share"] <= 1.0
    used = summary["samples"]
    assert (used["dropped_groups"], used["failed"]) == (0, {})
    assert used["trained_tokens"] == used["drawn_tokens"] > 0
    assert not (run_dir / "failures.jsonl").exists()
    commits = [event["version"] for event in events_of(run_dir, "version_committed")]
    assert commits == sorted(commits)
    assert commits[-1] == steps, "the last version serves at the end"
    assert summary["versions_committed"] == len(commits)
    assert events_of(run_dir, "version_aborted") == []
    about = summary["run"]
    assert (about["seed"], about["trainer"], about["architecture"]) == (0, "fsdp2", "Qwen3ForCausalLM")
    assert {"weightlane", "torch", "ray", "transformers"} <= about["libraries"].keys()
    assert any(name.startswith("vllm") for name in about["libraries"])
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    each = range(PROMPTS_PER_STEP * GROUP_SIZE)
    assert [sample["step"] for sample in samples] == [step for step in range(1, steps + 1) for _ in each]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    AutoTokenizer.from_pretrained(run_dir / "model")
    assert (model.dtype, (run_dir / "model" / "generation_config.json").is_file()) == (torch.float32, True)
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    record = read_record(run_dir)
    figures = {each["name"]: each["value"] for each in record["figures"]}
    assert (record["status"], figures["held-out accuracy, last"]) == ("ended", summary["accuracy_after"])
    assert record["stalls"]["blocking"] == pytest.approx(sync["lost_per_step_s"]["synchronous_update"])
    assert {span["lane"] for span in record["time_line"]} == {"trainer", "sync", "generation"}
    assert all(span["start"] <= span["end"] for span in record["time_line"])
    assert [path.name for path in (run_dir / "logs").iterdir()] == ["plugins.log"], "of a plugin that raises"
    assert not (run_dir / "versions").exists()


def test_a_run_ends_with_every_promised_file_and_a_resumed_one_continues_over_another_engine_until_ctrl_c_ends_it(
    material: Material, finished_run: FinishedRun, start_run: StartRun, tmp_path: Path
) -> None:
    run_dir, config = finished_run.run_dir, finished_run.config
    check_files(run_dir, steps=4)
    assert "weights by 'shm'" in finished_run.out
    assert "versions committed" in finished_run.out
    assert {path.name for path in (run_dir / "state").iterdir()} == {"latest.json", "run.lock", "step-2", "step-4"}
    assert data_position(run_dir, 2) == 2 * PROMPTS_PER_STEP
    assert data_position(run_dir, 4) == 4 * PROMPTS_PER_STEP

    for step in (2, 4):
        out = tmp_path / f"exported-{step}"
        done = run_command("export", str(run_dir), "--step", str(step), "--out", str(out))
        assert (done.exit_code, done.stdout) == (0, f"step {step} of {run_dir} is in {out}\n"), done.output
        exported = load_file(out / "model.safetensors")
        weights = saved_state(run_dir, step)
        assert all(torch.equal(tensor, weights[f"weight|{name}"]) for name, tensor in exported.items())
    last = load_tensors(run_dir / "model")
    assert last.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in last.items())
    for arguments, says in (
        (("--step", "3", "--out", "x"), "has no saved state of step 3. Saved steps: 2, 4."),
        (("--out", str(out)), "already exists"),
    ):
        refused = run_command("export", str(run_dir), *arguments)
        assert refused.exit_code == 2
        assert says in refused.stderr

    # A constant reward has no gradient, so what two more steps make of the optimizer depends on nothing but what it was.
    reward = CONSTANT_REWARD.format(saved=str(run_dir / "state" / "step-6"))
    config.with_name("constant_reward_of_test.py").write_text(reward)
    run = start_run(
        [
            *("train", str(config), "--plain", "--resume"),
            *("--set", "loop.steps=1000", "--set", "checkpoint_engine.backend=filesystem"),
            *("--set", "trainer.ranks=1", "--set", "reward.function=constant_reward_of_test:constant"),
        ]
    )
    latest = run_dir / "state" / "latest.json"
    run.wait_until(lambda: json.loads(latest.read_text())["step"] == 6, "state of step 6")
    run.wait_until(lambda: events_of(run_dir, "version_committed")[-1]["version"] == 6, "commit of version 6")
    run.interrupt(signal.SIGINT, whole_group=True)  # as Ctrl-C in a terminal does
    ended = run.end()
    assert (ended.code, ended.err) == (130, "interrupted; everything this run started has ended\n"), ended.out
    assert "weights by 'filesystem'" in ended.out
    assert "resuming at step 4" in ended.out
    assert [event["step"] for event in events_of(run_dir, "training_step")] == [1, 2, 3, 4, 5, 6]
    versions = [event["version"] for event in events_of(run_dir, "version_committed")]
    assert versions == [0, 1, 2, 3, 4, 4, 5, 6], "once more the version it was saved at, then the next ones"
    assert data_position(run_dir, 6) == 6 * PROMPTS_PER_STEP
    judged = Counter(config.with_name("judged.txt").read_text().split())
    trained = {json.loads(line)["prompt"] for line in material.train.read_text().splitlines()}
    assert len(judged.keys() & trained) >= 6 * PROMPTS_PER_STEP
    assert max(judged[prompt] for prompt in trained) == GROUP_SIZE, "no task was used twice"
    check_optimizer(*(saved_state(run_dir, step) for step in (4, 6)))


@pytest.mark.exhaustive
def test_a_run_of_an_adapter_with_a_critic_and_a_reference_publishes_it_alone_and_is_resumed_with_a_rank_for_each(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    """PPO with everything that it can have, at first on one rank, whose device has room for one role at a time."""
    run_dir = tmp_path / "run"
    config = material.write_config(
        tmp_path / "config",
        run_dir,
        loop={"save_every": 2},
        algorithm={"objective": "ppo", "kl_coefficient": 0.05},
        critic={"learning_rate": 1e-3},
        trainer={"offload_roles": True, "lora.rank": 4, "lora.publish": "adapter"},
    )
    for steps in (2, 4):
        apart = ["critic.ranks=1", "reference.ranks=1", "observers.trace=trace.json"] if steps > 2 else []
        more = ["--resume"] if steps > 2 else []
        for setting in (f"loop.steps={steps}", *apart):
            more += ["--set", setting]
        ended = start_run(["train", str(config), "--plain", *more]).end()
        assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    assert "starting 1 trainer rank(s), 1 critic rank(s), 1 reference rank(s)" in ended.out
    trace = load(run_dir / "trace.json")
    ranks = ["critic-0", "reference-0", "trainer-0"]
    assert [name for name in trace.processes.values() if name in ranks] == ranks
    for rank, names in zip(
        ranks, (["critic: forward", "critic: step"], ["reference: forward"], ["policy: step"]), strict=True
    ):
        spans = [span.name.rstrip(" 34") for span in trace.spans(rank, "training") if ": " in span.name]
        assert spans == names * 2
    events = events_of(run_dir, "training_step")
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert all({"critic/value", "reference_kl", "critic/loss"} <= event.keys() for event in events)
    assert sorted(path.name for path in (run_dir / "state" / "step-4").iterdir()) == ["critic", "loop.json", "trainer"]
    before, after = load_tensors(material.model), load_tensors(run_dir / "model")
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    adapted = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert {name.split(".")[-2] for name in changed} == adapted
    commits = events_of(run_dir, "version_committed")
    assert [commit["version"] for commit in commits] == [0, 1, 2, 2, 3, 4]
    # float32 A and B, every tensor of which begins at a multiple of 64 bytes
    wanted = sum(4 * 4 * sum(before[name].shape) for name in changed)
    assert {commit["sent_bytes"] for commit in commits} == {wanted}


@pytest.mark.exhaustive
def test_a_run_in_turns_draws_the_samples_of_one_with_devices_of_its_own_and_is_resumed_bit_for_bit(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    """With a reference on the same rank. One request at a time, so that nothing but the weights decides what is drawn."""
    alone = {"max_num_seqs": 1, "concurrency": GROUP_SIZE, "commit": "in_place"}
    runs = []
    for colocate in (False, True):
        run_dir = tmp_path / f"run-{colocate}"
        config = material.write_config(
            tmp_path / f"config-{colocate}",
            run_dir,
            loop={"save_every": 2, "max_staleness": 0, "blocking_syncs": 0, "samples_per_step": 8, "evaluate_every": 1},
            algorithm={"kl_coefficient": 0.05},
            trainer={"colocate": colocate},
            rollout=alone,
            sync={"quorum": 1.0},
        )
        for steps in (2, 3):
            more = ["--resume"] if steps == 3 else []
            ended = start_run(["train", str(config), "--plain", "--set", f"loop.steps={steps}", *more]).end()
            assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
        runs.append(run_dir)
    apart, turns = ([json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()] for run in runs)
    assert len(turns) == 3 * PROMPTS_PER_STEP * GROUP_SIZE
    for ours, theirs in zip(turns, apart, strict=True):
        assert {**ours, "time": 0} == {**theirs, "time": 0}
    for step in (2, 3):
        ours, theirs = saved_state(runs[1], step), saved_state(runs[0], step)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        assert ours.keys() == theirs.keys()
    assert [commit["version"] for commit in events_of(runs[1], "version_committed")] == [0, 1, 2, 2, 3]
    ended = events_of(runs[1], "turn_ended")
    step = ["generation", "training", "sync"]
    assert [event["turn"] for event in ended] == ["sync", *step, *step, "sync", *step]
    assert all(event["peak_bytes"].keys() == {"trainer-0", "rollout-0/0"} for event in ended)


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def data_position(run_dir: Path, step: int) -> int:
    """How many tasks were used up."""
    state = json.loads((run_dir / "state" / f"step-{step}" / "loop.json").read_text())
    assert state["step"] == step
    return int(state["stream"]["position"]) - len(state["outstanding"])


def saved_state(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    directory = run_dir / "state" / f"step-{step}" / "trainer"
    assert json.loads((directory / "state.json").read_text())["step"] == step
    return saved_tensors(directory)


def check_optimizer(at_4: dict[str, torch.Tensor], at_6: dict[str, torch.Tensor]) -> None:
    """Check that step 6 is step 4 after two AdamW steps without a gradient (Loshchilov and Hutter): parameters and moments."""
    assert at_6.keys() == at_4.keys()
    beta_1, beta_2 = BETAS
    for name in (key.removeprefix("weight|") for key in at_4 if key.startswith("weight|")):
        parameter, first, second = (at_4[f"{kind}|{name}"].double() for kind in ("weight", "exp_avg", "exp_avg_sq"))
        assert second.count_nonzero() > 0, "training had begun"
        for step in (5, 6):
            first, second = beta_1 * first, beta_2 * second
            denominator = (second / (1 - beta_2**step)).sqrt() + EPSILON
            parameter = parameter - LEARNING_RATE * (first / (1 - beta_1**step)) / denominator
        torch.testing.assert_close(at_6[f"exp_avg|{name}"].double(), first, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(at_6[f"exp_avg_sq|{name}"].double(), second, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(at_6[f"weight|{name}"].double(), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("qwen3-4b-one-node", {}),
        ("qwen3-0.6b-one-gpu", {"trainer.gpus_per_rank": "0", "rollout.gpus_per_rank": "0", "trainer.ranks": "1"}),
    ],
)
def test_recipes_for_gpus_run_at_tiny_size_by_their_own_files(
    material: Material, tmp_path: Path, start_run: StartRun, recipe: str, more: dict[str, str]
) -> None:
    settings = dict(re.findall(r"--set ([\w.]+)=(\S+)", (DOCS / "guides" / "recipes.md").read_text()))
    settings |= {"run.dir": str(tmp_path / "run"), "model.path": str(material.model), "loop.steps": "2", **more}
    settings |= {"data.train": str(material.train), "data.heldout": str(material.heldout)}
    settings["rollout.extra_engine_args.distributed_executor_backend"] = IN_ENGINE
    arguments = [part for setting in settings.items() for part in ("--set", "=".join(setting))]
    ended = start_run(["train", str(RECIPES / f"{recipe}.toml"), "--plain", *arguments]).end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["versions_committed"], summary["samples"]["failed"]) == (3, {})
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
