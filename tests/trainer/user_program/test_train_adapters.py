"""The example of a training program of one's own, as a user starts it, and the one of its guide."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import Teams
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "torchrun" / "train_adapters.py"
GUIDE = ROOT / "docs" / "guides" / "your-own-training-program.md"
TORCHRUN = "-m torch.distributed.run --nproc-per-node 2 --rdzv-endpoint 127.0.0.1:0 --rdzv-backend c10d --master-port 0"
ANSWERS = {"french": 5, "german": 9}


@pytest.mark.parametrize(
    ("program", "device"),
    [
        pytest.param([], "cpu", id="one rank"),
        pytest.param(TORCHRUN.split(), "cpu", id="torchrun", marks=pytest.mark.exhaustive),
        pytest.param([], "cuda", id="one GPU", marks=pytest.mark.gpu),
    ],
)
def test_the_example_trains_two_adapters_at_once_each_on_its_own_data(
    children: Any, models: dict[str, Path], tmp_path: Path, program: list[str], device: str
) -> None:
    """Merged by hand into transformers' model, each adapter knows its answer far better than the other one does."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert len(EXAMPLE.read_text().splitlines()) < 60
    rng, model, flags = random.Random(0), models["llama-untied"], []
    for name, answer in ANSWERS.items():
        pairs = [{"prompt": f"t{rng.randrange(60)}", "completion": f"t{answer}"} for _ in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        flags += ["--data", str(tmp_path / f"{name}.jsonl")]
    trainer = json.dumps({"device": device, "compute_dtype": "float32"})
    command = [*program, str(EXAMPLE), "--model", str(model), *flags, "--trainer", trainer, "--steps", "30"]
    # A forked process has imported torch and transformers already, but the processes of torchrun are its own.
    code, output, errors = children.run([*command, "--out", str(tmp_path / "out")], forked=not program)
    assert code == 0, errors
    losses = defaultdict(list)
    for name, loss in re.findall(r"^step \d+ (\w+): loss ([\d.]+)", output, re.MULTILINE):
        losses[name].append(float(loss))
    assert {name: len(found) for name, found in losses.items()} == dict.fromkeys(ANSWERS, 30)
    for name, answer in ANSWERS.items():
        own, other = (_logprob(model, tmp_path / "out" / each, answer) for each in (name, *(ANSWERS.keys() - {name})))
        assert own > other + 1
        assert losses[name][-1] < losses[name][0] - 0.5


def test_the_programs_of_the_guide_run(teams: Teams, tmp_path: Path) -> None:
    """The second one goes on from the imports of the first."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    ranks, model = teams.of(2), teams.models["llama-untied"]
    ranks.all("join")
    first, second = ranks.all("run_program", code="\n".join(blocks), model=model, out=tmp_path)
    assert first.keys() == {"french", "german"}
    assert {each.name for each in tmp_path.iterdir()} == {"base", "french"}
    assert first == second


def _logprob(model_dir: Path, adapter: Path, answer: int) -> float:
    """Mean log-probability of `answer` after any token, with the adapter added to the weights."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    about, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    with torch.no_grad():
        for name, module in model.named_modules():
            if (key := f"base_model.model.{name}.lora_A.weight") in tensors:
                product = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
                module.weight.add_(product, alpha=about["lora_alpha"] / about["r"])
        return float(model(torch.arange(60)[:, None]).logits[:, 0].log_softmax(-1)[:, answer].mean())
