"""Measures how long a rollout rank takes to find out where the tensors of a large mixture of experts go: once, as it starts.

    python -m benchmarks.layout_scale [--case NAME] [--rounds 3] [--json FILE]

Models of 48 layers of 128 experts, in the sizes of real ones, as one rank of vLLM's builds them. Each case runs in a process of
its own. Memory for parameters is asked for and never touched, and nothing is loaded. Every element of every parameter must be
written by just one copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from typing import Any

import torch

from benchmarks.command import Report, case_in_own_process, finish, options_of, say

LAYERS, EXPERTS = 48, 128
_ATTENTION = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    # Sizes of gpt-oss-120b, which has its experts in one tensor, and of Qwen3-30B-A3B, which has them one by one.
    "gpt-oss": ("GptOss", {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": EXPERTS}, 8, True),
    "qwen3-moe": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": EXPERTS, **_ATTENTION},
        8,
        True,
    ),
    "qwen3-moe-sliced": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": EXPERTS, **_ATTENTION},
        8,
        False,
    ),
}
"""Architecture, sizes, tensor-parallel ranks, and whether experts are divided between them by number."""
MOST_S = 10.0
"""Most seconds that a rank may take."""
_TIMEOUT_S = 300.0


def measure_case(name: str, rounds: int, layers: int = LAYERS) -> dict[str, Any]:
    """Trace the loading of rank 0 so often, here."""
    from weightlane.rollout.layout.offline.rank_models import engine_config, model_of_rank, quiet_vllm

    quiet_vllm()
    import transformers

    from weightlane.rollout.layout import SourceSpec, needed_boxes, trace_loading
    from weightlane.rollout.layout.map.coverage import target_coverage
    from weightlane.trainer.engines.fsdp2.shards import checkpoint_tensors
    from weightlane.trainer.engines.hf.names import checkpoint_runs

    architecture, sizes, ranks, by_number = CASES[name]
    config = getattr(transformers, f"{architecture}Config")(num_hidden_layers=layers, **sizes, dtype="bfloat16")
    config.architectures = [f"{architecture}ForCausalLM"]
    with torch.device("meta"):
        outline = transformers.AutoModelForCausalLM.from_config(config)
    runs = checkpoint_runs(outline, checkpoint_tensors(outline))
    sent = {run.name: SourceSpec(run.shape, torch.bfloat16) for run in runs}
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        vllm_config = engine_config(
            folder,
            tensor_parallel=ranks,
            dtype="bfloat16",
            expert_parallel=by_number,
            extra={"max_model_len": 1024},
        )
        with model_of_rank(vllm_config, 0) as model:
            for _ in range(rounds):
                began = time.perf_counter()
                layout = trace_loading(model, sent)
                needed_boxes(layout)
                seconds.append(time.perf_counter() - began)
    counts = target_coverage(layout).values()
    return {
        "case": name,
        "layers": layers,
        "ranks": ranks,
        "by_number": by_number,
        "tensors": len(sent),
        "elements": sum(spec.numel for spec in sent.values()),
        "copies": len(layout.copies),
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "verified": not layout.refused_sources and not any(count.unmapped or count.doubled for count in counts),
    }


def run(cases: list[str], rounds: int) -> Report:
    """Every case in a process of its own, one after the other."""
    rows = []
    for case in cases:
        say(f"tracing {case}")
        rows.append(case_in_own_process("layout_scale", case, ["--rounds", str(rounds)], _TIMEOUT_S))
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    return {"machine": machine, "rounds": rounds, "rows": rows, "verified": all(row["verified"] for row in rows)}


def text(report: Report) -> str:
    """The table in Markdown, and whether the aim is met."""
    lines = [
        "| model | rank of | tensors | G elements | copies | seconds | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        divided = ", experts by number" if row["by_number"] else ""
        lines.append(
            f"| {row['case']}, {row['layers']} x {EXPERTS} | {row['ranks']}{divided} | {row['tensors']} |"
            f" {row['elements'] / 1e9:.1f} | {row['copies']} | {min(row['seconds']):.2f} | {row['peak_mib']:.0f} |"
        )
    met = all(min(row["seconds"]) <= MOST_S for row in report["rows"])
    lines.append(f"aim: {MOST_S:g} s for a rank: {'met' if met else 'MISSED'}")
    if not report["verified"]:
        lines.append("NOT VERIFIED: a tensor was refused, or an element is written by no copy or by two")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON if asked to."""
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one; repeatable")
    parser.add_argument("--here", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure_case(options.here, options.rounds)))
        return 0
    return finish("layout_scale", lambda: run(options.case or list(CASES), options.rounds), text, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
