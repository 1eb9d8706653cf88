"""Runs a conformance suite with several ranks on one GPU, which NCCL refuses unless it takes them for ranks of several machines.

    python -m benchmarks.gpu.one_gpu nccl|fsdp2|megatron [--halves 4] [--ranks 2] [--check NAME]... [--junit FILE]

Each process calls itself another machine (`another_host/sitecustomize.py`), and NCCL connects them by sockets on loopback. Their
kernels take turns on the GPU. So this shows what is computed and how failures end, for a real NCCL, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

HOSTS = Path(__file__).resolve().parent / "another_host"
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
_OUT = os.dup(1)
PATIENT = {"deadline_s": 30.0, "slack_s": 10.0, "prompt_s": 20.0, "grace_s": 20.0}
"""Limits of the suites: kernels of several processes take turns of some milliseconds."""


def main() -> int:
    """Run the suite; exit code 1 when a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["nccl", "fsdp2", "megatron"])
    parser.add_argument("--halves", type=int, default=4, help="most halves of a checkpoint engine")
    parser.add_argument("--ranks", type=int, default=2, help="of a training engine")
    parser.add_argument("--check", action="append", default=[], help="only this check")
    parser.add_argument("--junit", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(HOSTS))  # from which PYTHONPATH of the processes that the suites start is made
    os.environ |= NCCL | {"PYTHONPATH": os.pathsep.join([str(HOSTS), os.environ.get("PYTHONPATH", "")])}
    shared: dict[str, Any] = {"checks": options.check, "junit": options.junit, "on_check": tell}
    # Imported here because each of the two needs packages that the other does not.
    if options.engine == "nccl":
        from weightlane.ckpt_engines.conformance import run_conformance

        report: Any = run_conformance("nccl", limits={"most_halves": options.halves, **PATIENT}, **shared)
    else:
        from weightlane.trainer.conformance import run_training_conformance

        layout = {"device": "cuda", "ranks": options.ranks}
        report = run_training_conformance(options.engine, layout, limits=PATIENT, **shared)
    return 0 if report.passed else 1


def tell(check: Any) -> None:
    """Print a check's outcome as soon as it is known, although pytest has taken standard output: the step may be ended early."""
    lines = [f"{check.outcome} {check.name} {check.seconds:.1f} s", *check.detail.splitlines()]
    os.write(_OUT, ("\n    ".join(lines) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
