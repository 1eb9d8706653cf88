"""The command line; see README.md."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.bench.workload.workload import MODELS

from .catalogue import catalogue
from .report import merged
from .runner import Plan, run
from .table import markdown


def main() -> int:
    """Measure, print the table, write the JSON. Exit code 1 when a peer that ran delivered wrong values or failed."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.show:
        print(markdown(json.loads(arguments.show.read_text())))
        return 0
    if arguments.add and not arguments.json:
        parser.error("--add adds to a --json file")
    everything = catalogue()
    names = [name for name in everything if arguments.only is None or name.startswith(arguments.only)]
    if not names:
        parser.error(f"nothing begins with {', '.join(arguments.only)}; there are {', '.join(everything)}")
    if arguments.add:
        names = [name for name in everything if name in names or everything[name].group == "limit"]
    if arguments.list:
        for name in names:
            print(f"{name:30} {everything[name].what}")
        return 0
    try:
        return _measure(arguments, names, list(everything))
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def _measure(arguments: argparse.Namespace, names: list[str], everything: list[str]) -> int:
    plan = Plan(
        arguments.model,
        arguments.receivers,
        arguments.rounds,
        arguments.passes,
        repeats=arguments.repeats,
        turn_s=arguments.turn_s,
        deadline_s=arguments.deadline_s,
        quiet_s=arguments.quiet_s,
        interpreters={
            name: path for beginning, path in arguments.python for name in everything if name.startswith(beginning)
        },
        lock=arguments.lock,
        lock_s=arguments.lock_s,
    )
    before = json.loads(arguments.json.read_text()) if arguments.add and arguments.json.exists() else None

    def whole(report: dict[str, Any]) -> dict[str, Any]:
        return merged(before, report, everything) if before else report

    def save(report: dict[str, Any]) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(whole(report), indent=1) + "\n")

    # Told to end, it ends what it started and removes its folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = run(plan, names, lambda line: print(line, file=sys.stderr, flush=True), save)
    print(markdown(whole(report)))
    return int(any("failed" in row or not row.get("verified", True) for row in report["rows"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"{', '.join(MODELS)}, or a directory of safetensors files, all bfloat16"
    )
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds per peer")
    parser.add_argument(
        "--passes", type=int, default=2, help="how often to go through the list, a part of the rounds each"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="more turns for peers of which others disturbed most rounds"
    )
    parser.add_argument(
        "--turn-s", type=float, default=20.0, help="seconds of rounds after which a slow peer's turn ends early"
    )
    parser.add_argument("--only", type=_names, help="names, or beginnings of names, separated by commas")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument(
        "--add",
        action="store_true",
        help="keep those rows of the --json file that are not measured now; limits always are",
    )
    parser.add_argument(
        "--show", type=Path, metavar="JSON", help="print the table of an earlier report and measure nothing"
    )
    parser.add_argument("--list", action="store_true", help="print what there is and measure nothing")
    parser.add_argument(
        "--python",
        type=_interpreter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="measure the peers whose name begins so with this interpreter",
    )
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="hold this file's lock while peers run, some minutes at a time"
    )
    parser.add_argument("--lock-s", type=float, default=150.0, help="after how long others get a turn at that lock")
    parser.add_argument(
        "--quiet-s", type=float, default=30.0, help="longest wait for a quiet machine per turn; 0 for none"
    )
    parser.add_argument("--deadline-s", type=float, default=60.0, help="for every single wait of a peer")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _interpreter(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if not found or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH of a Python interpreter")
    return name, path


if __name__ == "__main__":
    sys.exit(main())
