"""The figures of asynchronous against synchronous runs are those of their events, and accuracies those of greedy decoding."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def events(seconds_per_step: float, staleness: int) -> list[dict[str, Any]]:
    """Those of six steps, of which the first takes five seconds more."""
    figures = {"seconds": 0.5, "overlap_share": 0.25, "failed_items": 0, "dropped_groups": 0}
    step = {"event": "training_step", "staleness_mean": staleness / 2, "staleness_max": staleness, **figures}
    lines = [step | {"step": number, "time": 105.0 + number * seconds_per_step} for number in range(1, 7)]
    return [{"event": "run_started", "time": 100.0}, *lines, {"event": "run_ended", "time": 200.0}]


def test_rates_and_times_are_those_of_the_loop(async_against_sync: ModuleType, tmp_path: Path) -> None:
    rows = []
    for mode, seconds, staleness in (("synchronous", 2.0, 0), ("asynchronous", 1.0, 2)):
        for seed, last in ((0, 0.75), (1, 0.5)):
            found = async_against_sync.row_of(events(seconds, staleness), {0: 0.25, 2: 0.5, 6: last})
            rows.append({"setting": "delays", "mode": mode, "seed": seed, **found})
    assert rows[0]["samples_per_s"] == 128 / 2.0
    assert rows[0]["curve"] == [[0.0, 0.25], [9.0, 0.5], [17.0, 0.75]]
    settings, machine = {"seeds": 2, "steps": 6, "samples": 128}, {"cpu": "a processor", "cores": 2}
    report = {"rows": rows, "settings": settings, "date": "2026-11-30", "machine": machine}
    shown = async_against_sync.markdown(report)
    assert "2 cores of a processor, 2026-11-30: 2 seeds, 6 steps of 128 samples." in shown
    assert "| 64 (64 to 64) |  | 0.62 | 0.50 in 9 (9 to 9) | 0.00 | 18% |" in shown
    assert "| 128 (128 to 128) | 2.00 | 0.62 | 0.50 in 7 (7 to 7) | 1.00 | 27% |" in shown
    async_against_sync.draw(report, tmp_path / "figure.svg")
    assert "2.00 times the samples per second" in (tmp_path / "figure.svg").read_text()


def test_accuracy_in_one_pass_is_that_of_greedy_decoding(multiples: ModuleType) -> None:
    example = runpy.run_path(str(ROOT / "examples/arithmetic/prepare.py"))
    torch.manual_seed(0)
    tokenizer = example["make_tokenizer"]()
    model = example["make_model"](tokenizer, multiples.CONTEXT)
    tasks = [task for task in multiples.make_tasks() if task["prompt"].endswith(("*01=", "*02="))][:8]
    rows = multiples.Rows(tokenizer, tasks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(60):  # learns half of the answers by heart
        optimizer.zero_grad()
        torch.autograd.backward(rows.loss(model, torch.arange(4)))
        optimizer.step()
    right = [greedy(model, tokenizer, task["prompt"]) == task["answer"] for task in tasks]
    assert any(right)
    assert not all(right)
    assert rows.accuracy(model) == sum(right) / len(tasks)


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    """What the model writes up to its end, or 12 tokens."""
    ids = tokenizer.encode(prompt)
    written: list[int] = []
    while (
        len(written) < 12
        and (token := int(model(torch.tensor([ids + written])).logits[0, -1].argmax())) != tokenizer.eos_token_id
    ):
        written.append(token)
    return str(tokenizer.decode(written))
