"""Options of the programs that steps run, and where their figures go."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import command


def options_of(about: str | None, *, deadline_s: float = 0.0) -> argparse.ArgumentParser:
    """A parser that takes --device, --json, and --deadline-s where a default is given; see `benchmarks.command.options_of`."""
    parser = command.options_of(about, deadline_s=deadline_s)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    return parser


def finish(figures: dict[str, Any], to: Path | None) -> int:
    """Print the figures, and write them as JSON to the file `to` if there is one; the exit code 0."""
    text = json.dumps(figures, indent=1) + "\n"
    print(text)
    if to is not None:
        to.write_text(text, encoding="utf-8")
    return 0
