"""How many of a checkpoint's bfloat16 elements change from one optimizer step to the next, in training that really learns.

    python -m benchmarks.density --json density.json --plot density.png

Master weights are float32 and what travels is their rounding to bfloat16, so a step that moves a weight by less than half the
distance to the next bfloat16 value mostly changes nothing on the wire. Two models: the one of examples/arithmetic, further
trained on its additions after its own preparation, and a Qwen3 of 27 million parameters, first trained a little from random
weights, on this repository's own Markdown, byte by byte. Each learning rate goes on from the same weights with a fresh AdamW.
"""

from __future__ import annotations

import argparse
import copy
import json
import runpy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from .peers.report import machine

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATES = (1e-4, 1e-5, 1e-6)
TICKS_PERCENT = (1, 2, 5, 10, 20, 50, 100)
BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0
LossOf = Callable[[torch.nn.Module], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, step by step."""

    model: str
    parameters: int
    learning_rate: float
    density: list[float]
    """Share of the bfloat16 elements whose bits differ from those of the step before, 0 to 1."""
    loss: list[float]


def wire_bits(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the bits that a sync would send: each parameter in bfloat16, viewed as int16; tied parameters once."""
    return [parameter.detach().to(torch.bfloat16).view(torch.int16) for parameter in model.parameters()]


def changed_share(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Share of all elements that differ in any bit."""
    changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    return changed / sum(tensor.numel() for tensor in after)


def train(name: str, model: torch.nn.Module, loss_of: LossOf, learning_rate: float, steps: int) -> Run:
    """Train a copy of `model` and count after each step."""
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
    density, losses = [], []
    before = wire_bits(trained)
    for _ in range(steps):
        losses.append(_step(trained, optimizer, loss_of))
        after = wire_bits(trained)
        density.append(changed_share(before, after))
        before = after
    size = sum(parameter.numel() for parameter in trained.parameters())
    return Run(name, size, learning_rate, density, losses)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf) -> float:
    loss = loss_of(model)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.detach())


def demo(steps: int) -> tuple[torch.nn.Module, LossOf]:
    """The arithmetic example's model after at most `steps` of its own preparation, and its loss on random additions."""
    example = runpy.run_path(str(ROOT / "examples/arithmetic/prepare.py"))
    tokenizer = example["make_tokenizer"]()
    model: torch.nn.Module = example["make_model"](tokenizer)
    rows, prompt_length = example["encode"](tokenizer, example["make_tasks"](0)[example["HELDOUT"] :])
    example["warm_up"](model, rows, prompt_length, steps, 0.4)

    def loss_of(trained: torch.nn.Module) -> torch.Tensor:
        batch = rows[torch.randint(len(rows), (128,))]
        logits = trained(batch[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, prompt_length:].flatten())

    return model, loss_of


def byte_model(steps: int) -> tuple[torch.nn.Module, LossOf]:
    """A Qwen3 of 8 layers and hidden size 512, trained for `steps` at 5e-4 on bytes of Markdown, and its loss."""
    text = b"\n".join(path.read_bytes() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    )

    def loss_of(trained: torch.nn.Module) -> torch.Tensor:
        starts = torch.randint(len(data) - 65, (8,))
        batch = torch.stack([data[start : start + 65] for start in starts.tolist()])
        logits = trained(batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=BETAS, weight_decay=0.0, fused=True)
    for _ in range(steps):
        _step(model, optimizer, loss_of)
    return model, loss_of


def measure(model: str, steps: int, before_steps: int) -> list[Run]:
    """Every learning rate on one of `MODELS`."""
    name, make = MODELS[model]
    prepared, loss_of = make(before_steps)
    runs = []
    for learning_rate in LEARNING_RATES:
        torch.manual_seed(1)  # the same batches for each
        run = train(name, prepared, loss_of, learning_rate, steps)
        print(f"{name}, {learning_rate:g}: {_percent(statistics.median(run.density))}", flush=True)
        runs.append(run)
    return runs


def markdown(runs: list[dict[str, Any]]) -> str:
    """One line per run; the first step stands apart, since AdamW's first moves every weight by the whole rate."""
    lines = [
        "| model | learning rate | first step | median of the others | lowest | highest | loss, first to last |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        later = run["density"][1:]
        lines.append(
            f"| {run['model']}, {run['parameters'] / 1e6:.1f} M | {run['learning_rate']:g} | {_percent(run['density'][0])} |"
            f" {_percent(statistics.median(later))} | {_percent(min(later))} | {_percent(max(later))} |"
            f" {run['loss'][0]:.3f} to {run['loss'][-1]:.3f} |"
        )
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel per model, one line per learning rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = report["runs"]
    models = list(dict.fromkeys(run["model"] for run in runs))
    lowest = [run["density"][1:] for run in runs if run["learning_rate"] == min(LEARNING_RATES)]
    low, high = (choose(statistics.median(each) for each in lowest) for choose in (min, max))
    figure, axes = plt.subplots(1, len(models), figsize=(10, 4.2), sharey=True, layout="constrained", squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for run in (each for each in runs if each["model"] == model):
            percent = [100 * value for value in run["density"]]
            (line,) = axis.plot(range(1, len(percent) + 1), percent, linewidth=1.8)
            axis.annotate(
                f"lr {run['learning_rate']:g}",
                (len(percent), percent[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                color=line.get_color(),
                va="center",
            )
        size = next(run["parameters"] for run in runs if run["model"] == model)
        axis.set_title(f"{model}, {size / 1e6:.1f} M parameters", fontsize=10)
        axis.set_yscale("log")
        axis.set_yticks(TICKS_PERCENT, [f"{tick} %" for tick in TICKS_PERCENT])
        axis.minorticks_off()
        axis.set_ylim(0.8, 110)
        axis.set_xlabel("optimizer step")
        axis.set_xlim(0, max(len(run["density"]) for run in runs) * 1.25)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("bfloat16 elements that changed")
    figure.suptitle(
        f"The smaller the learning rate, the less there is to send: at {min(LEARNING_RATES):g}"
        f" a step changes {_percent(low)}{'' if low == high else f' to {_percent(high)}'} of the wire"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


MODELS = {"demo": ("arithmetic demo", demo), "bytes": ("byte-level Qwen3", byte_model)}


def _report(kept: dict[str, list[dict[str, Any]]], threads: int) -> dict[str, Any]:
    return {
        "benchmark": "density",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {**machine(), "threads_per_process": threads},
        "optimizer": {"name": "AdamW", "betas": BETAS, "weight_decay": 0.0, "max_grad_norm": MAX_GRAD_NORM},
        "runs": [run for name, _ in MODELS.values() for run in kept.get(name, [])],
    }


def main() -> None:
    """Measure one model or both, print the table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="all of them by default")
    parser.add_argument("--steps", type=int, default=40, help="per learning rate")
    parser.add_argument(
        "--before", type=int, help="most steps before counting; 300 of the demo's own, 40 for the other"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the report; what it has of other models stays there")
    parser.add_argument("--plot", type=Path, help="draw the report there")
    parser.add_argument("--show", action="store_true", help="measure nothing, only print and draw the report in --json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kept: dict[str, list[dict[str, Any]]] = {}
    if arguments.json and arguments.json.exists():
        for run in json.loads(arguments.json.read_text())["runs"]:
            kept.setdefault(run["model"], []).append(run)
    report = _report(kept, arguments.threads)
    for model in () if arguments.show else arguments.model or MODELS:
        torch.manual_seed(0)
        before = arguments.before or {"demo": 300, "bytes": 40}[model]
        kept[MODELS[model][0]] = [asdict(run) for run in measure(model, arguments.steps, before)]
        report = _report(kept, arguments.threads)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report["runs"]))
    if arguments.plot:
        plot(report, arguments.plot)


if __name__ == "__main__":
    main()
