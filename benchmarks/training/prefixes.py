"""Tokens per second of groups of completions over long prompts, next to the same without `trainer.fsdp2.shared_prefixes`.

    python -m benchmarks.training.prefixes [--groups 30] [--completions 16] [--prompt 1024] [--completion 64] [--json FILE]

Two fsdp2 engines of one process, with and without, compute forward and backward of the same batch in turns. Tokens per second
count all tokens of all sequences, however many of them are computed. Log-probabilities and gradient norms of both must agree.
The last two rows have as many sequences as two groups, each with a prompt of its own. "Planning" is the part of the time in which
prefixes are looked for, micro-batches are planned, and their tokens are laid out. The aims: three times plain packing for the
groups, and, for both batches, no more than 1 % of the time for planning beyond that of plain packing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report, finish, options_of, say, shown, spread, table
from benchmarks.training.engines import write_model

AIM = 3.0
"""Least tokens per second of many groups, in those of plain packing."""
MOST_PLANNING = 0.01
"""Most time of planning beyond that of plain packing, as a share of the seconds of the same row."""
VOCABULARY = 512
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
WITH, WITHOUT = "shared", "plain packing"
LARGEST_DIFFERENCE = 1e-4
"""Most nats between log-probabilities, and most relative difference of gradient norms: the rounding of float32."""


def groups_of(groups: int, completions: int, prompt: int, completion: int, *, shared: bool = True) -> Any:
    """Return a batch of `groups` times `completions` sequences; completions have half to one and a half of `completion` tokens.

    Unless `shared`, every sequence has a prompt of its own.
    """
    from weightlane.trainer import TokenBatch, TokenSequence

    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> list[int]:
        found: list[int] = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        return found

    sequences = []
    for _ in range(groups):
        begins = drawn(prompt)
        for number in range(completions):
            length = completion // 2 + completion * number // max(1, completions - 1)
            sequences.append(TokenSequence.of_completion(begins if shared else drawn(prompt), drawn(max(1, length))))
    return TokenBatch(tuple(sequences))


@contextmanager
def engines(folder: Path, threads: int, micro_batch_tokens: int) -> Iterator[dict[str, Any]]:
    """Set up one engine that shares prefixes, and one that does not."""
    from weightlane.trainer import TrainerConfig
    from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine

    made = {}
    for name, share in ((WITHOUT, False), (WITH, True)):
        config = TrainerConfig(
            device="cpu",
            threads_per_rank=threads,
            micro_batch_tokens=micro_batch_tokens,
            learning_rate=1e-30,  # every round begins with the same weights
            max_grad_norm=1e30,
            fsdp2={"shared_prefixes": share},
        )
        made[name] = Fsdp2Engine(config, 0, 1, ("127.0.0.1", 0))
        made[name].setup(folder, seed=0)
    try:
        yield made
    finally:
        for engine in reversed(made.values()):
            engine.close()


def planning_s(engine: Any, batch: Any) -> float:
    """Seconds for planning the micro-batches of `batch` and laying out their tokens, as `engine` does."""
    from weightlane.trainer.engines.hf.layout import Layout

    started, share = time.perf_counter(), engine.config.fsdp2.shared_prefixes
    for _, micro in engine._share(batch, 0, 1, padded=False, share_prefixes=share):
        Layout.packed([micro], share=share)
    return time.perf_counter() - started


def measure(of: dict[str, Any], what: str, batch: Any, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each engine, which compute `batch` in turns; the first round does not count."""
    from weightlane.trainer import sft

    seconds: dict[str, list[float]] = {name: [] for name in of}
    metrics, norms, logprobs = {}, {}, {}
    for _ in range(rounds + 1):
        for name, engine in of.items():
            started = time.perf_counter()
            result = engine.forward_backward(batch, sft, outputs=("logprobs",))
            seconds[name].append(time.perf_counter() - started)
            norms[name] = engine.optim_step(lambda _: None)
            metrics[name] = result.metrics
            logprobs[name] = torch.cat([result.outputs[index]["logprobs"] for index in range(len(batch))])
        say(f"{what}: {', '.join(f'{name} {times[-1]:.2f} s' for name, times in seconds.items())}")
    apart = float((logprobs[WITH] - logprobs[WITHOUT]).abs().max())
    apart = max(apart, abs(norms[WITH] / norms[WITHOUT] - 1))
    return [
        {
            "what": what,
            "method": name,
            "read_tokens": int(metrics[name]["read_tokens"]),
            "packed_tokens": int(metrics[name]["packed_tokens"]),
            "seconds": spread(times[1:]),
            "planning_s": planning_s(of[name], batch),
            "apart": apart,
        }
        for name, times in seconds.items()
    ]


def text(report: Report) -> str:
    """A line for each engine on each batch."""
    plain = {row["what"]: row["seconds"]["median"] for row in report["rows"] if row["method"] == WITHOUT}
    rows = [
        (
            row["what"],
            row["method"],
            f"{row['read_tokens']:,}",
            f"{row['packed_tokens']:,}",
            shown(row["seconds"]),
            f"{1000 * row['planning_s']:.3g}",
            f"{row['read_tokens'] / row['seconds']['median']:,.0f}",
            f"{plain[row['what']] / row['seconds']['median']:.2f}",
        )
        for row in report["rows"]
    ]
    return table(
        ("what", "method", "tokens", "packed tokens", "s", "planning ms", "tokens/s", "times plain packing"), rows
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure groups, and sequences that share nothing."""
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--groups", type=int, default=30)
    parser.add_argument("--completions", type=int, default=16, help="of each group")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens, on average")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args(arguments)
    sizes = asked.completions, asked.prompt, asked.completion

    def measured() -> Report:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), torch.float32, **MODEL)
            with engines(Path(folder), asked.threads, asked.micro_batch_tokens) as both:
                about = f"{asked.groups} groups of {asked.completions}, prompts of {asked.prompt} tokens"
                rows = measure(both, about, groups_of(asked.groups, *sizes), asked.rounds)
                alone = groups_of(2, *sizes, shared=False)
                rows += measure(both, f"{len(alone)} sequences that share nothing", alone, asked.rounds)
        plain, shared = (row["seconds"]["median"] for row in rows[:2])
        pairs = zip(rows[::2], rows[1::2], strict=True)
        quick = all(
            row["planning_s"] - before["planning_s"] <= MOST_PLANNING * row["seconds"]["median"]
            for before, row in pairs
        )
        return {
            "rows": rows,
            "verified": max(row["apart"] for row in rows) < LARGEST_DIFFERENCE,
            "met": plain / shared >= AIM and quick,
        }

    return finish("prefixes", measured, text, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
