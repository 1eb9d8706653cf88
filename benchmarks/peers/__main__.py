"""Runs the peers in turns; see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command import Report, finish, options_of, say
from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.cli.bench.workload.workload import MODELS, Workload, named_workload

from .catalogue import CATALOGUE, Peer, PeerProcesses, Turn
from .report import rows_of, text

WARM_UPS = 3
"""Rounds that do not count, unless they take half of the turn: who keeps the version before gets the memory of a second one in
the second, and uses what the first one had in the third."""
TMPFS = "/dev/shm"  # noqa: S108 - everything goes into fresh folders below it


def run(options: argparse.Namespace, names: Sequence[str]) -> Report:
    """Measure the peers `names`, forwards and backwards in turn, so that changes of the machine meet everybody."""
    workload = named_workload(options.model)
    if any(spec.dtype is not torch.bfloat16 for spec in workload.specs):
        raise ConfigError(f"not all tensors of {options.model} are bfloat16, which peers carry here.", part="peers")
    peers = {name: peer for name, peer in CATALOGUE.items() if name in set(names)}
    answers: dict[str, dict[str, Any]] = {name: {"rounds": []} for name in peers}
    passes = min(options.passes, options.rounds)
    for number in range(passes):
        rounds = options.rounds * (number + 1) // passes - options.rounds * number // passes
        for name in list(peers) if number % 2 == 0 else reversed(list(peers)):
            if not answers[name].keys() & {"unavailable", "failed"}:
                before = len(answers[name]["rounds"])
                answers[name] |= measured(options, workload, peers[name], rounds, answers[name]["rounds"])
                found = [f"{each['latency_s']:.3f}" for each in answers[name]["rounds"][before:]]
                why = [f"{kind}: {answers[name][kind]}" for kind in ("unavailable", "failed") if kind in answers[name]]
                say(f"pass {number + 1} of {passes}, {name}: {' '.join(why or found)}")
    rows = rows_of(peers, answers)
    about = {"name": workload.name, "payload_bytes": workload.nbytes, "tensors": len(workload.specs)}
    return {
        "workload": {**about, "receivers": options.receivers},
        "rows": rows,
        "verified": all(row.get("verified", True) for row in rows),
        "met": not any("failed" in row for row in rows),
    }


def measured(
    options: argparse.Namespace, workload: Workload, peer: Peer, rounds: int, seen: list[dict[str, Any]]
) -> dict[str, str]:
    """Add the rounds of one peer's turn to `seen`. Returns why there were none, ``unavailable``, or no more, ``failed``."""
    try:
        with _turn(options, workload, peer.environment) as turn:
            turn.every("prepare", workload.to_plain(), 0, 1)
            if reason := turn.sender("missing", peer.modules):
                return {"unavailable": f"{reason}; {peer.install}"}
            with peer.opened(turn) as exchange:
                began, number, counted, warm_ups = time.monotonic(), 0, 0, WARM_UPS
                while counted < rounds and not (counted and time.monotonic() > began + options.turn_s):
                    turn.sender("change", 1.0)
                    figures, warm_up = exchange(), number < warm_ups
                    digest, *found = turn.every("crc") if peer.group != "limit" else [0]  # limits copy aside
                    seen.append({"warm_up": warm_up, "verified": {*found} <= {digest}, **figures})
                    counted += not warm_up
                    number += 1
                    if warm_up and time.monotonic() > began + options.turn_s / 2:
                        warm_ups = number
    except WeightlaneError as error:
        return {"failed": f"{type(error).__name__}: {error}".replace("\n", " ")}
    return {}


@contextlib.contextmanager
def _turn(options: argparse.Namespace, workload: Workload, environment: Mapping[str, str]) -> Iterator[Turn]:
    """Processes and folders of a turn, which are gone afterwards with everything that was started."""
    with tempfile.TemporaryDirectory(prefix="peers-", dir=TMPFS, ignore_cleanup_errors=True) as memory:
        # Removed with the processes. Some peers leave files at home.
        disk, before = Path(tempfile.mkdtemp(prefix="peers-")), dict(os.environ)
        os.environ.update({"MKL_NUM_THREADS": "1", "HOME": memory, **environment})
        try:
            processes = PeerProcesses(options.receivers, workload.flat_bytes, disk)
        finally:
            os.environ.clear()
            os.environ.update(before)
        try:
            yield Turn(processes, options.deadline_s, Path(memory), disk)
        finally:
            family = [each for pid in processes.pids for each in _children(pid)]
            processes.close()
            for each in family:
                with contextlib.suppress(psutil.Error):
                    each.kill()


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Exit code 1 when a peer that ran delivered wrong values or failed."""
    parser = options_of(__doc__, rounds=5, deadline_s=60.0)
    models = ", ".join(MODELS)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"{models}, or a directory of safetensors files, all bfloat16"
    )
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument(
        "--passes", type=int, default=2, help="how often to go through the list, a part of the rounds each"
    )
    parser.add_argument("--turn-s", type=float, default=20.0, help="seconds of rounds after which a turn ends early")
    parser.add_argument("--only", help="names, or beginnings of names, separated by commas; limits are always measured")
    parser.add_argument("--list", action="store_true", help="print what there is and measure nothing")
    options = parser.parse_args(arguments)
    if min(options.receivers, options.rounds, options.passes) < 1:
        parser.error("--receivers, --rounds and --passes must be at least 1")
    asked = tuple((options.only or "").split(","))
    names = [name for name, peer in CATALOGUE.items() if name.startswith(asked) or peer.group == "limit"]
    if options.list:
        print("\n".join(f"{name:30} {CATALOGUE[name].what}" for name in names))
        return 0
    return finish("peers", lambda: run(options, names), text, options.json)


if __name__ == "__main__":
    sys.exit(main())
