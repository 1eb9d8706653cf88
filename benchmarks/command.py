"""Helpers for benchmark commands: options, a case in its own process, and output as a table, JSON and an exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import WeightlaneError
from weightlane.cli.bench.workload.workload import MODELS

Report = dict[str, Any]


def say(what: str) -> None:
    """Tell on standard error what is going on."""
    print(what, file=sys.stderr, flush=True)


def options_of(
    about: str | None, *, model: str = "", rounds: int = 0, deadline_s: float = 0.0
) -> argparse.ArgumentParser:
    """Takes --json, and --model, --rounds and --deadline-s with these defaults where they are given.

    Args:
        about: The benchmark's docstring, for --help.
        model: Name of a workload.
        rounds: How often each way is measured.
        deadline_s: Longest time for any single thing, in seconds.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        names = ", ".join(dict.fromkeys((model, *MODELS)))
        parser.add_argument("--model", default=model, help=f"{names}, or a directory of safetensors files")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    if deadline_s:
        parser.add_argument("--deadline-s", type=float, default=deadline_s, help="for any single thing")
    parser.add_argument("--json", type=Path)
    return parser


def case_in_own_process(name: str, case: str, arguments: Sequence[str], timeout_s: float) -> Report:
    """Run ``python -m benchmarks.NAME --here CASE ARGUMENTS`` on one thread; return its last line, parsed as JSON."""
    done = subprocess.run(  # noqa: S603 - a benchmark of this folder
        [sys.executable, "-m", f"benchmarks.{name}", "--here", case, *arguments],
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}: {case} ended with {done.returncode}: {done.stderr[-2000:]}")
    row: Report = json.loads(done.stdout.splitlines()[-1])
    return row


def finish(name: str, measure: Callable[[], Report], text: Callable[[Report], str], to: Path | None) -> int:
    """Measure, print the table, and write the report as JSON if asked to.

    Args:
        name: Of the benchmark, for its errors.
        measure: Makes the report; its ``verified`` says whether every bit was right.
        text: The report as a table.
        to: Where the JSON goes.

    Returns:
        The exit code: 1 when any bit was wrong, 2 where the benchmark cannot run here.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is ended
    try:
        report = measure()
    except WeightlaneError as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    print(text(report))
    if to is not None:
        to.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["verified"] else 1
