"""See the package's docstring. Its options: ``python -m benchmarks.gpu --help``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036 - what is imported below needs it, too
    sys.exit("weightlane needs Python 3.11 or newer: name one that has torch, with make gpu PYTHON=...")

from .checkout import PACKAGES, ROOT, make_importable, what_is_missing
from .report import markdown, report_of
from .running import PASSED, Result, run_step
from .steps import TOTAL_S, steps

_PROBE_S = 120.0
_FAILED, _BAD_USAGE = 1, 2


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command's options; exit code 2 for a part that does not exist."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Check and measure what the GPUs of this machine allow."
    )
    parser.add_argument("--parts", default="one", help=f"of {', '.join(TOTAL_S)}; several with commas")
    parser.add_argument("--only", default="", help="names of steps, with commas; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder for gpu.json, gpu.md and logs")
    options = parser.parse_args(arguments)
    options.parts = [part for part in options.parts.split(",") if part]
    if unknown := sorted(set(options.parts) - set(TOTAL_S)):
        parser.error(f"there is no part called {', '.join(unknown)}; there are {', '.join(TOTAL_S)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the steps that were asked for, and publish their report. Returns the exit code."""
    options = options_of(arguments)
    with tempfile.TemporaryDirectory(prefix="weightlane-gpu-") as folder:
        make_importable(Path(folder, "path"))
        env = environment(Path(folder, "path"))
        facts = probe(env)
        if missing := what_is_missing(facts):
            print("\n".join(missing), file=sys.stderr)
            return _FAILED
        names = ", ".join(device["name"] for device in facts["devices"])
        print(f"{names}; driver {facts['driver']}, torch {facts['torch']}, Python {facts['python']}", flush=True)
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\nmarkers =\n    gpu\n    exhaustive\n    property\n", encoding="utf-8")
        results = run_all(options, facts, ini, env)
    if not results:
        print(f"there is no step called {options.only} in {', '.join(options.parts)}", file=sys.stderr)
        return _BAD_USAGE
    return publish(report_of(facts, datetime.now(UTC).date().isoformat(), options.parts, results), options.out)


def environment(importable: Path) -> dict[str, str]:
    """The environment of every step: in it the checkout is imported ahead of anything that is installed."""
    packages = str(PACKAGES) if PACKAGES.is_dir() else ""
    path = [str(importable), str(ROOT), packages, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "NO_COLOR": "1", "COLUMNS": "200"}


def probe(env: dict[str, str]) -> dict[str, Any]:
    """Run `benchmarks.gpu.probe` in a process of its own. Returns its facts; exit code 1 where it fails."""
    command = [sys.executable, "-m", "benchmarks.gpu.probe"]
    try:
        asked = subprocess.run(  # noqa: S603 - a program of this folder
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        sys.exit(f"it could not be found out what this Python has: {error}\n{getattr(error, 'stderr', '') or ''}")
    return found


def run_all(options: argparse.Namespace, facts: dict[str, Any], ini: Path, env: dict[str, str]) -> list[Result]:
    """Run every step that was asked for, whether or not others pass. Returns their results."""
    only = {name for name in options.only.split(",") if name}
    logs = options.out / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    logs.mkdir(parents=True, exist_ok=True)
    results = []
    for part in options.parts:
        ends = time.monotonic() + TOTAL_S[part]
        for step in steps(facts, ini):
            if step.part != part or (only and step.name not in only):
                continue
            print(f"== {step.name}: {step.shown}", flush=True)
            result = run_step(step, facts, logs, ends - time.monotonic(), env)
            results.append(result)
            print(f"   {result.outcome} after {result.seconds:.0f} s {result.why}".rstrip(), flush=True)
            for name, value in result.figures.items():
                print(f"      {name}: {f'{value:.4g}' if isinstance(value, float) else value}", flush=True)
    return results


def publish(report: dict[str, Any], out: Path) -> int:
    """Write the report to the folder `out`. Returns the exit code."""
    table = markdown(report)
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(table, encoding="utf-8")
    print(f"\n{table}")
    failed = [step["name"] for step in report["steps"] if step["outcome"] != PASSED]
    print(f"not passed: {', '.join(failed)}" if failed else "all passed")
    return 0 if report["passed"] else _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
