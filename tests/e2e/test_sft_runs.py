"""Whole runs of ``weightlane sft`` on trainer ranks in Ray: every promised file, a resume, and a model that others load."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_process import StartRun, events_of
from safetensors.torch import load_file
from tiny_run import Material, toml_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner
from waiting import HANG_S

from weightlane.cli.main import app

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PEFT_WEIGHTS = "adapter_model.safetensors"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"


def write_config(material: Material, folder: Path) -> Path:
    """A run over conversations, whose template writes what the tasks' prompts and answers are."""
    files = {}
    for name, tasks in (("train", material.train), ("heldout", material.heldout)):
        files[name] = folder / f"{name}.jsonl"
        with files[name].open("w") as file:
            for task in map(json.loads, tasks.read_text().splitlines()):
                turns = [("user", task["prompt"]), ("assistant", task["answer"])]
                file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    model = folder / "base"
    AutoModelForCausalLM.from_pretrained(material.model).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(material.model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    config = folder / "sft.toml"
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model)},
        "data": {name: str(file) for name, file in files.items()},
        "sft": {"epochs": 2, "batch_size": 16, "evaluate_every": 3},
        "ray": {"start_timeout_s": HANG_S},
        "trainer": {"ranks": 1, "learning_rate": 1e-2, "cpus_per_rank": 0.5},
        "observers": {"trace": "trace.json", "tensorboard": "board"},
    }
    config.write_text(toml_of(sections))
    return config


def heldout_logprob(model: Path, material: Material, adapter: Path | None = None) -> float:
    """The mean log-probability of the answers and the end of text, by transformers and the formula of an adapter alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        config, tensors = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / PEFT_WEIGHTS)
        downs = [name for name in tensors if name.endswith("lora_A.weight")]
        assert downs
        for name in downs:
            layer = network.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            layer.weight.data += config["lora_alpha"] / config["r"] * change
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for task in map(json.loads, material.heldout.read_text().splitlines()):
        prompt, answer = (tokenizer(task[key]).input_ids for key in ("prompt", "answer"))
        ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = network(ids[None]).logits[0].log_softmax(-1)
        found += [float(logprobs[place - 1, ids[place]]) for place in range(len(prompt), len(ids))]
    return sum(found) / len(found)


def test_a_supervised_run_leaves_a_model_that_others_load_and_every_file(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    config, run_dir = write_config(material, tmp_path), tmp_path / "run"
    ended = start_run(["sft", str(config), "--plain"]).end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    assert "step 5/5" in ended.out
    assert [event["step"] for event in events_of(run_dir, "training_step")] == [1, 2, 3, 4, 5]
    assert [event["step"] for event in events_of(run_dir, "evaluated")] == [0, 3, 5]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["run"]["trainer"]) == (5, 2.0, "fsdp2")
    before, after = summary["heldout_logprob_before"], summary["heldout_logprob_after"]
    assert before == pytest.approx(heldout_logprob(material.model, material), abs=1e-4)
    assert after == pytest.approx(heldout_logprob(run_dir / "model", material), abs=1e-4)
    assert after > before + 0.5
    files = {path.name for path in run_dir.iterdir()}
    assert files == {"board", "config.toml", "metrics.jsonl", "model", "state", "summary.json", "trace.json"}
    refused = CliRunner().invoke(app, ["sft", str(config), "--plain", "--resume"])
    assert refused.exit_code == 2
    assert "is complete: it has taken 5 of 5 steps" in refused.stderr


@pytest.mark.exhaustive
def test_a_supervised_run_of_an_adapter_that_a_signal_ends_is_resumed_and_leaves_it_as_files_of_peft(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    config, run_dir = write_config(material, tmp_path), tmp_path / "run"
    adapter = ["sft", str(config), "--plain", "--set", "trainer.lora.rank=4", "--set", "trainer.ranks=2"]
    run = start_run([*adapter, "--set", "sft.steps=100000", "--set", "sft.save_every=1", "--set", "sft.export_every=3"])
    run.wait_for("step 4/")
    run.interrupt(signal.SIGTERM)
    ended = run.end()
    assert (ended.code, ended.err) == (143, "terminated; everything this run started has ended\n")
    assert (run_dir / "exports" / "step-3" / PEFT_WEIGHTS).is_file()
    saved = json.loads((run_dir / "state" / "latest.json").read_text())["step"]
    last = saved + 2
    ended = start_run([*adapter, "--resume", "--set", f"sft.steps={last}"]).end()
    assert (ended.code, ended.err) == (0, ""), ended.out + ended.err
    assert [event["step"] for event in events_of(run_dir, "training_step")][-2:] == [saved + 1, last]
    assert not (run_dir / "model").exists()
    [untrained, *_, after] = (event["mean_logprob"] for event in events_of(run_dir, "evaluated"))
    assert untrained == pytest.approx(heldout_logprob(material.model, material), abs=1e-4)
    assert after == pytest.approx(heldout_logprob(material.model, material, run_dir / "adapter"), abs=1e-4)
