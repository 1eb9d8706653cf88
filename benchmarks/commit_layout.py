"""How long a commit into live vLLM takes: by copies along the traced layout, by plain copies, by vLLM's layerwise reload.

    python benchmarks/commit_layout.py --tp 1 --tp 2 --rounds 15 --json commit_layout.json

A model of Qwen3-0.6B's width, cut to the layers that make a checkpoint of about 400 MB in bfloat16, runs in vLLM with random
weights. Every rank holds one version in memory, as staging does. In each round the ways follow one another, in changing order,
in all ranks at once; a round of a way takes as long as its slowest rank. "memcpy" is torch's copy of as many bytes as the
copies move, in one piece, as everywhere in these benchmarks; "libc" is libc's, which writes past the caches what is longer
than a share of them (40 MB where this was written), as single parameters are not. "agreement" is the message between ranks
that a traced commit begins with. After the last round, and outside the timing, parameters are compared with the version bit
for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 32768
WAYS = ("memcpy", "libc", "traced", "reload", "agreement")
TARGETS = {"memcpy": 1.2, "reload": 0.5}
"""Most that the traced commit may take, in shares of each."""


class CommitWorker:
    """Mixed into vLLM's worker by ``worker_extension_cls``."""

    def bench_prepare(self, specs: list[tuple[str, list[int]]]) -> dict[str, Any]:
        """Stage a random version and learn the layout; returns what was learned."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_tp_group

        from weightlane.rollout.layout import VersionLoader
        from weightlane.rollout.layout.rank_model import RankModel
        from weightlane.rollout.rank_group import RankGroup

        self._group = RankGroup(get_tp_group().cpu_group)
        stream = torch.empty(sum(torch.Size(shape).numel() for _, shape in specs), dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        stream.view(torch.int16).random_(-(1 << 14), 1 << 14, generator=generator)
        self._version, start = {}, 0
        for name, shape in specs:
            count = torch.Size(shape).numel()
            self._version[name] = stream[start : start + count].view(shape)
            start += count
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        self._loader = VersionLoader(RankModel(model, config, torch.device("cpu"), "rank"))
        began = time.perf_counter()
        with set_current_vllm_config(config):
            self._loader.learn_for(self._version, self._group)
            way = self._loader.write(self._version)
        plan = self._loader.plan
        if plan is None:
            raise RuntimeError(f"versions are not copied: {self._loader.method}")
        self._from = torch.ones(plan.layout.bytes_copied, dtype=torch.uint8)
        self._to = torch.zeros_like(self._from)
        return {
            "way": way,
            "first_s": time.perf_counter() - began,
            "copies": len(plan.layout.copies),
            "bytes": plan.layout.bytes_copied,
            "threads": torch.get_num_threads(),
        }

    def bench_round(self, way: str) -> float:
        """Seconds of one commit."""
        from vllm.config import set_current_vllm_config

        from weightlane.rollout.layout.loading.reload import load_version

        config = self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(config):
            self._group.gather(None)  # All ranks begin together.
            began = time.perf_counter()
            if way == "memcpy":
                self._to.copy_(self._from)
            elif way == "libc":
                np.copyto(self._to.numpy(), self._from.numpy())
            elif way == "agreement":
                self._group.gather(None)
            elif way == "traced":
                self._loader.learn_for(self._version, self._group)
                self._loader.write(self._version)
            else:
                model = self.model_runner.get_model()  # type: ignore[attr-defined]
                load_version(model, config.model_config, self._version.items(), part="rank")
            return time.perf_counter() - began

    def bench_check(self) -> list[str]:
        """Parameters that are not the version's after a commit over other values."""
        plan = self._loader.plan
        assert plan is not None
        parameters = dict(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]
        states = []
        for other in (3.0, 5.0):
            for parameter in parameters.values():
                parameter.data.fill_(other)
            plan.commit(self._version)
            states.append({name: parameter.clone().view(torch.uint8) for name, parameter in parameters.items()})
        return [name for name in parameters if not torch.equal(states[0][name], states[1][name])]


def write_config(directory: Path, layers: int) -> list[tuple[str, list[int]]]:
    """A checkpoint directory without weights; returns the names and shapes of its tensors."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    return [(name, list(tensor.shape)) for name, tensor in model.named_parameters()]


def measure(tensor_parallel: int, layers: int, rounds: int) -> dict[str, Any]:
    """One replica's figures."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as directory:
        specs = write_config(Path(directory), layers)
        engine = LLM(
            directory,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=tensor_parallel,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            skip_tokenizer_init=True,
            weight_transfer_config={"backend": "weightlane"},
            worker_extension_cls="commit_layout.CommitWorker",
        )
        learned = engine.collective_rpc("bench_prepare", args=(specs,))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for index in range(rounds + 2):
            turn = index % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                slowest = max(engine.collective_rpc("bench_round", args=(way,)))
                if index > 1:  # The first rounds touch memory for the first time.
                    times[way].append(slowest)
        differing = [name for rank in engine.collective_rpc("bench_check") for name in rank]
        del engine
    return {
        "tensor_parallel": tensor_parallel,
        "ranks": learned,
        "verified": not differing,
        **{
            f"{way}_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            for way, seconds in times.items()
        },
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and whether targets are met."""
    print(f"{'ranks':>5} {'MB per rank':>12}  " + "".join(f"{way + ' ms':>28}" for way in WAYS) + "   traced / others")
    for row in rows:
        cells = [row[f"{way}_s"] for way in WAYS]
        figures = "".join(
            f"{1e3 * cell['median']:>10.1f} ({1e3 * cell['min']:.1f} - {1e3 * cell['max']:.1f})".rjust(28)
            for cell in cells
        )
        traced = row["traced_s"]["median"]
        ratios = [
            f"{traced / row[f'{other}_s']['median']:.2f} of {other} (target {most:.1f})"
            for other, most in TARGETS.items()
        ]
        ratios.append(f"{traced / row['libc_s']['median']:.2f} of libc")
        verified = "" if row["verified"] else "  NOT VERIFIED"
        print(
            f"{row['tensor_parallel']:>5} {row['ranks'][0]['bytes'] / 1e6:>12.1f}  {figures}   {', '.join(ratios)}{verified}"
        )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tp", type=int, action="append", help="ranks of a replica; repeatable; default 1 and 2")
    parser.add_argument("--layers", type=int, default=12, help="layers of 31.5 MB each, beside an embedding of 67 MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures there too")
    arguments = parser.parse_args()
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
    rows = [measure(ranks, arguments.layers, arguments.rounds) for ranks in arguments.tp or [1, 2]]
    show(rows)
    if arguments.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
