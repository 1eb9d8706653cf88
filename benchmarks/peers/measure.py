"""Measures one peer in this process and prints a line of JSON per round: the program that is started for each turn."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from weightlane.cli.bench.workload.workload import Workload

from .halves import Line, Session
from .others import CATALOGUE

WARM_UPS = 3
"""Rounds that do not count, unless they take half of the turn: who keeps the version before gets the memory of a second one in
the second, and uses what the first one had in the third."""


def main() -> None:
    """Read the order from standard input, measure, say what was found or why nothing was."""
    order: dict[str, Any] = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a peer prints is no answer of ours
    torch.set_num_threads(1)

    def answer(**what: object) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        if reason := CATALOGUE[order["peer"]].missing():
            answer(unavailable=reason)
        else:
            measure(order, answer)
    except Exception as error:  # noqa: BLE001 - whatever fails belongs in the table
        traceback.print_exc()
        answer(failed=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}")


def measure(order: dict[str, Any], answer: Any) -> None:
    """Carry the weights for as many rounds as `order` asks for, and call `answer` with the figures of each."""
    peer = CATALOGUE[order["peer"]]
    receivers = min(order["receivers"], peer.most_receivers)
    line = Line(receivers, order["deadline_s"], Path(order["memory_dir"]), Path(order["disk_dir"]))
    session = Session(peer, Workload.from_plain(order["workload"]), line)
    try:
        session.prepare()
        answer(versions=peer.versions())
        began, number, counted, warm_ups = time.monotonic(), 0, 0, WARM_UPS
        while counted < order["rounds"] and not (counted and time.monotonic() > began + order["turn_s"]):
            session.change(number)
            figures = session.exchange(number)
            warm_up = number < warm_ups
            answer(round=number, warm_up=warm_up, **figures, verified=session.verify(number))
            counted += not warm_up
            number += 1
            if warm_up and time.monotonic() > began + order["turn_s"] / 2:
                warm_ups = number
    finally:
        session.close()
    answer(done=True)
