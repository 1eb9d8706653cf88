"""How the benchmarks that measure with weightlane's own processes end: with a table, a JSON file if asked for, an exit code."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import WeightlaneError

Report = dict[str, Any]


def say(what: str) -> None:
    """Tell on standard error what is going on."""
    print(what, file=sys.stderr, flush=True)


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
