"""Reads a configuration file for the command that its sections imply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .run_config import RunConfig, load_config
from .sft_config import SftRunConfig, load_sft_config
from .tinker_config import TinkerConfig, as_written, load_tinker_config
from .toml_file import command_of, read_toml
from .worker_config import WorkerConfig, load_worker_config


def load_any_config(
    path: Path, overrides: Sequence[str] = (), *, runs_here: bool = True
) -> RunConfig | SftRunConfig | TinkerConfig | WorkerConfig:
    """Read the configuration of the command that `command_of` finds."""
    command = command_of(read_toml(path))
    if command == "sft":
        return load_sft_config(path, overrides)
    if command == "tinker":
        return as_written(load_tinker_config(path, overrides))
    if command == "worker":
        return load_worker_config(path, overrides)
    return load_config(path, overrides, runs_here=runs_here)
