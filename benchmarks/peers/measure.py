"""Measures one peer in this process and prints a line of JSON per round: the program that the runner starts per turn.

What to measure comes as JSON on standard input: ``{"peer": "gloo-flat", "workload": {...}, ...}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from .catalogue import catalogue
from .cpu_guard import CpuGuard
from .peer import Peer, Session, Task
from .workload import Workload

_WARM_UPS = 3
"""Rounds that do not count, unless they take half of the turn: who keeps the version before gets the memory of a second one in
the second, and uses what the first one had in the third."""


def main() -> None:
    """Read the order, measure, say what was found or why nothing was."""
    order: dict[str, Any] = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer of ours
    torch.set_num_threads(1)
    peer = catalogue()[order["peer"]]
    if reason := peer.unavailable_reason():
        _say(out, unavailable=reason)
        return
    try:
        _measure(peer, order, out)
    except Exception as error:  # noqa: BLE001 - whatever fails belongs in the table
        traceback.print_exc()
        _say(out, failed=f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}")


def _measure(peer: Peer, order: dict[str, Any], out: Any) -> None:
    task = Task(
        Workload.from_plain(order["workload"]),
        order["receivers"],
        order["deadline_s"],
        Path(order["memory_dir"]),
        Path(order["disk_dir"]),
    )
    guard = CpuGuard()
    began = time.monotonic()
    with peer.open(task) as session:
        _say(out, opened=True, versions=peer.versions(), setup_s=time.monotonic() - began)
        clean, number = 0, 0
        began, warm_ups = time.monotonic(), _WARM_UPS
        until = began + order["turn_s"]
        # Rounds that others disturbed are done again, up to twice as many in all.
        while clean < order["rounds"] and number < warm_ups + 2 * order["rounds"]:
            found = _round(session, number, guard)
            warm_up = number < warm_ups
            clean += not warm_up and found["clean"]
            _say(out, round=number, warm_up=warm_up, **found)
            number += 1
            if warm_up and time.monotonic() > began + order["turn_s"] / 2:
                warm_ups = number
            if clean and time.monotonic() > until:
                _say(out, out_of_time=True)
                break
    _say(out, done=True)


def _round(session: Session, number: int, guard: CpuGuard) -> dict[str, Any]:
    session.change(number)
    guard.start()
    times = session.exchange(number)
    foreign_s, clean = guard.stop()
    return {
        "trainer_blocked_s": times.trainer_blocked_s,
        "rollout_blocked_s": times.rollout_blocked_s,
        "latency_s": times.latency_s,
        "foreign_cpu_s": foreign_s,
        "clean": clean,
        "verified": session.verify(number),
    }


def _say(out: Any, **what: object) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()
