"""How many of a checkpoint's bfloat16 elements change from one optimizer step to the next, in training that really learns.

    python -m benchmarks.training.density --json density.json

Master weights are float32 and what travels is their rounding to bfloat16, so a step that moves a weight by less than half the
distance to the next bfloat16 value mostly changes nothing on the wire. Two models: the one of examples/arithmetic, further
trained on its additions after its own preparation, and a Qwen3 of 27 million parameters, first trained a little from random
weights, on this repository's own Markdown, byte by byte. Each learning rate goes on from the same weights with a fresh AdamW.
"""

from __future__ import annotations

import copy
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.command import Report, finish, options_of, say, table

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATES = (1e-4, 1e-5, 1e-6)
BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0
LossOf = Callable[[torch.nn.Module], torch.Tensor]


Run = dict[str, Any]
"""One training run: its ``density`` by step is the share of bfloat16 elements whose bits differ from those of the step before."""


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
    return {"model": name, "parameters": size, "learning_rate": learning_rate, "density": density, "loss": losses}


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
        say(f"{name}, {learning_rate:g}: {_percent(statistics.median(run['density']))}")
        runs.append(run)
    return runs


COLUMNS = ("model", "learning rate", "first step", "median of the others", "lowest", "highest", "loss, first to last")


def text(report: Report) -> str:
    """One line per run; the first step stands apart, since AdamW's first moves every weight by the whole rate."""
    rows = []
    for run in report["rows"]:
        later, loss = run["density"][1:], run["loss"]
        shares = [_percent(share) for share in (run["density"][0], statistics.median(later), min(later), max(later))]
        name = f"{run['model']}, {run['parameters'] / 1e6:.1f} M"
        rows.append([name, f"{run['learning_rate']:g}", *shares, f"{loss[0]:.3f} to {loss[-1]:.3f}"])
    return table(COLUMNS, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


MODELS = {"demo": ("arithmetic demo", demo), "bytes": ("byte-level Qwen3", byte_model)}


def main(arguments: list[str] | None = None) -> int:
    """Measure one model or both, and print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--model", choices=[*MODELS], action="append", help="all of them by default")
    parser.add_argument("--steps", type=int, default=40, help="per learning rate")
    parser.add_argument("--before", type=int, help="most steps before counting; 300 of the demo, 40 of the other")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    def measured() -> Report:
        rows: list[Run] = []
        for model in options.model or MODELS:
            torch.manual_seed(0)
            rows += measure(model, options.steps, options.before or {"demo": 300, "bytes": 40}[model])
        return {"rows": rows, "verified": True}

    return finish("density", measured, text, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
