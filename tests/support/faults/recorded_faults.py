"""The faults that the engine ``faulty`` recorded in its log."""

from __future__ import annotations

from pathlib import Path

from weightlane.ckpt_engines.faulty.faults import FaultRecord


def faults_in(log: str | Path) -> list[FaultRecord]:
    """Every fault in `log`, oldest first; none where there is no such file yet."""
    path = Path(log)
    return [FaultRecord.model_validate_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []
