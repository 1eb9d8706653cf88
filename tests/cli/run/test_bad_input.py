"""A run detects a user's mistakes before it starts anything, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import Material

from weightlane.ckpt_engines import AddressInUseError, ConfigError, WeightlaneError


class Trial:
    """A run that must fail before it starts."""

    def __init__(self, material: Material, folder: Path) -> None:
        self.material = material
        self.folder = folder
        self.run_dir = folder / "run"
        self.sections: dict[str, dict[str, Any]] = {}

    def copy_of_model(self) -> Path:
        """A model directory that the test may break."""
        model = self.folder / "model"
        shutil.copytree(self.material.model, model)
        self.sections["model"] = {"path": str(model)}
        return model

    def fails(self, error: type[WeightlaneError], *said: str, resume: bool = False) -> None:
        from weightlane.cli.commands.check import check_run
        from weightlane.cli.commands.train import run_training

        path = self.material.write_config(self.folder, self.run_dir, **self.sections)
        before = self.run_dir.exists() and sorted(self.run_dir.rglob("*"))
        with pytest.raises(error) as caught:
            asyncio.run(run_training(path, [], resume=resume, live=False))
        with pytest.raises(error) as checked:
            check_run(path, [], resume=resume)
        assert str(checked.value).partition("probe-")[0] == str(caught.value).partition("probe-")[0]
        for text in said:
            assert text in str(caught.value)
        assert (self.run_dir.exists() and sorted(self.run_dir.rglob("*"))) == before


@pytest.fixture
def trial(material: Material, tmp_path: Path, nothing_starts: None) -> Trial:
    return Trial(material, tmp_path)


def truncated_weights(trial: Trial) -> None:
    weights = trial.copy_of_model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def weights_of_another_size(trial: Trial) -> None:
    config = trial.copy_of_model() / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 128', '"intermediate_size": 96'))


def malformed_task(trial: Trial) -> None:
    train = trial.folder / "tasks.jsonl"
    train.write_text("\n".join([*trial.material.train.read_text().splitlines()[:2], '{"prompt": "1+1="}']) + "\n")
    trial.sections["data"] = {"train": str(train)}


def a_group_that_is_too_large(trial: Trial) -> None:
    train = trial.folder / "tasks.jsonl"
    train.write_text('{"prompt": "1+1=", "answer": "2", "samples": 4000}\n')
    trial.sections["data"] = {"train": str(train), "group_size_key": "samples"}


def tasks_in_both_files(trial: Trial) -> None:
    trial.sections["data"] = {"train": str(trial.material.heldout)}


def an_environment_without_a_reward(trial: Trial) -> None:
    trial.sections |= {"environment": {"name": "single_turn"}, "reward": {"function": None}}


def engine(name: str, **options: str) -> Callable[[Trial], None]:
    sections = {"checkpoint_engine": {"backend": name}, "checkpoint_engine.options": options}
    return lambda trial: trial.sections.update(sections)


def configured(section: str, **settings: Any) -> Callable[[Trial], None]:
    return lambda trial: trial.sections.update({section: settings})


def replay_without_experts(trial: Trial) -> None:
    trial.sections |= {"algorithm": {"router_replay": True}, "rollout": {"engine": "transformers"}}


def a_cluster_of_one_machine(trial: Trial) -> None:
    trial.sections |= {"ray": {"address": "auto"}, "sync": {"host": "::1"}}


def critic_ranks_that_do_not_fit(trial: Trial) -> None:
    layout = {"engine": "megatron", "ranks": 2, "megatron.pipeline_parallel": 2}
    trial.sections |= {"algorithm": {"objective": "ppo"}, "trainer": layout, "critic": {"ranks": 3}}


TARGET = configured("trainer", **{"engine": "megatron", "lora.targets": ["qkv_proj"]})
OTHER_WEIGHTS = [
    ({"model.norm.weight": torch.zeros(0)}, "missing keys model.norm.weight"),
    ({"model.norm.weight": torch.zeros(96)}, "mismatched shapes of model.norm.weight"),
    ({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}, "unexpected keys model.layers.9.mlp"),
]
SPLIT = configured("trainer", **{"engine": "megatron", "ranks": 2, "megatron.tensor_parallel": 2})


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (truncated_weights, ["truncated or damaged"]),
        (weights_of_another_size, ["do not fit their config.json: mismatched keys", "mlp.down_proj.weight"]),
        (configured("trainer.lora", targets=["q_prj"]), ["no linear layer 'q_prj'", "Did you mean 'q_proj'?"]),
        (configured("trainer", engine="megatron", optimizer="muon"), ["the engine 'megatron' has adamw"]),
        (configured("trainer", gpus_per_rank=99), ["need 99 GPUs", "Lower trainer.ranks"]),
        (configured("rollout", max_model_len=65), ["the model has 64 positions", "to at most 64"]),
        (configured("rollout", tensor_parallel=3), ["does not divide the model's 2 attention heads"]),
        (a_cluster_of_one_machine, ["sync.host is ::1, which other machines", "Set sync.host"]),
        (replay_without_experts, ["algorithm.router_replay is true, and Qwen3ForCausalLM has no layer with experts"]),
        (malformed_task, ["tasks.jsonl", "line 3", "'answer' is missing"]),
        (a_group_that_is_too_large, ["line 1: 'samples' is 4000, and rollout.concurrency is", "Raise rollout.conc"]),
        (tasks_in_both_files, ["held-out prompts", "are also in"]),
        (
            configured("algorithm", advantages="rlo"),
            ["algorithm.advantages is 'rlo'", "Did you mean 'rloo'?"],
        ),
        (configured("algorithm", refill=1, objective="ppo"), ["refill is 1, and objective is ppo"]),
        (configured("reward", function="no_such_module:judge"), ["could not be imported", "no_such_module"]),
        (configured("reward", function=None), ["reward.function is missing: nothing would judge"]),
        (an_environment_without_a_reward, ["environment single_turn judges by reward.function, which is missing"]),
        (
            configured("reference", ranks=2),
            ["reference.ranks is 2, and only a run with algorithm.kl_coefficient above"],
        ),
        (engine("gloo", host="203.0.113.7"), ["checkpoint_engine 'gloo' does not work here", "host", "203.0.113.7"]),
        (
            engine("filesystem", path="/proc/nowhere"),
            ["checkpoint_engine 'filesystem' does not work here", "/proc/nowhere"],
        ),
        pytest.param(
            SPLIT, ["tensor_parallel=2 does not divide the model's 1 key and value heads"], marks=pytest.mark.megatron
        ),
        pytest.param(TARGET, ["no linear layer 'qkv_proj'"], marks=pytest.mark.megatron),
        pytest.param(
            critic_ranks_that_do_not_fit,
            [
                "critic.ranks is 3, with which",
                "copies of the model of 1 x 2 ranks",
                "Set critic.ranks to a multiple of 2",
            ],
            marks=pytest.mark.megatron,
        ),
    ],
)
def test_a_bad_model_task_reward_engine_or_address_is_refused(
    trial: Trial, break_it: Callable[[Trial], None], said: list[str]
) -> None:
    """The run raises a `ConfigError` before it starts. `tests/trainer` covers the other faults of each kind."""
    break_it(trial)
    trial.fails(ConfigError, *said)


def test_a_taken_port_is_refused_and_a_used_run_directory_offers_to_resume(trial: Trial) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trial.sections["sync"] = {"port": port}
        trial.fails(AddressInUseError, str(port))
    (trial.run_dir / "state").mkdir(parents=True)
    (trial.run_dir / "state" / "latest.json").write_text('{"step": 2}')
    (trial.run_dir / "metrics.jsonl").touch()
    trial.fails(ConfigError, str(trial.run_dir), "already holds a run", "--resume", "--set run.dir=")


def test_resuming_needs_a_run_that_is_not_over_and_the_state_of_this_model(trial: Trial) -> None:
    trial.fails(ConfigError, "no saved state", "Leave --resume out", resume=True)
    (trial.run_dir / "state" / "step-3").mkdir(parents=True)
    (trial.run_dir / "state" / "latest.json").write_text('{"step": 3}')
    loop = trial.run_dir / "state" / "step-3" / "loop.json"
    stream = {"seed": 0, "tasks": 40, "epoch": 0, "position": 12}
    loop.write_text(json.dumps({"step": 3, "stream": stream | {"tasks": 7}, "outstanding": []}))
    # Not over: a full disk has kept it from its model.
    trial.fails(ConfigError, "tasks = 7, this one has 40", resume=True)
    (trial.run_dir / "model").mkdir()
    trial.fails(ConfigError, "has taken 3 of 3 steps", "Raise loop.steps", resume=True)
    loop.write_text(json.dumps({"step": 2, "stream": stream | {"tasks": 7}, "outstanding": []}))
    trial.fails(ConfigError, "tasks = 7, this one has 40", resume=True)
    loop.write_text(json.dumps({"step": 2, "stream": stream, "outstanding": []}))
    trial.fails(ConfigError, "holds no saved training state", resume=True)
    for step, (change, says) in enumerate(OTHER_WEIGHTS):
        loop.write_text(json.dumps({"step": step, "stream": stream, "outstanding": []}))
        weights = load_file(trial.material.model / "model.safetensors") | change
        (state := trial.run_dir / f"state/step-{step}/trainer").mkdir(parents=True)
        (state / "state.json").write_text('{"format": 2, "state": "1", "ranks": 1, "step": 2, "steps": {}}')
        slices = {f"weight|{name}|{','.join('0' * each.ndim)}": each for name, each in weights.items() if each.numel()}
        save_file(slices, state / "rank-00000.safetensors", {"state.json": "1"})
        trial.fails(ConfigError, f"does not fit this model: {says}", resume=True)
    loop.write_text("{}")
    trial.fails(ConfigError, "loop state is damaged", resume=True)
    loop.write_text("{")
    trial.fails(ConfigError, "loop.json is damaged", resume=True)
