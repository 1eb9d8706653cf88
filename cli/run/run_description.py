"""Describes a run by seed, model, engines, library versions and commit, so that it can be repeated."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from weightlane.trainer.engines.hf.model_dir import ModelInfo

from ..config.run_config import RunConfig
from ..config.sft_config import SftRunConfig

_LIBRARIES = ("weightlane", "torch", "vllm", "transformers", "ray", "megatron", "triton")
"""Names of modules, because vLLM's distributions have other names on other platforms."""


def about_run(config: RunConfig | SftRunConfig, model: ModelInfo, config_file: Path) -> dict[str, Any]:
    """Return seed, model, engines, library versions, and the commit of the repository with `config_file`, as plain data."""
    return {
        "seed": config.run.seed,
        "model": config.model.path,
        "architecture": model.architecture,
        "trainer": config.trainer.engine,
        **({"checkpoint_engine": config.checkpoint_engine.backend} if isinstance(config, RunConfig) else {}),
        "python": platform.python_version(),
        "libraries": _versions(),
        "commit": _commit(config_file.parent),
    }


def _versions() -> dict[str, str]:
    """Return the versions of the installed libraries by distribution."""
    installed = importlib.metadata.packages_distributions()
    named = sorted({distribution for name in _LIBRARIES for distribution in installed.get(name, ())})
    return {name: importlib.metadata.version(name) for name in named}


def _commit(folder: Path) -> str:
    """Return the commit, with ``-dirty`` if files differ from it; empty without a repository or git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # noqa: S607 - the git on the path
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
