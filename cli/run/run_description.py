"""Notes seed, model, engines, library versions and commit of a run, so that it can be understood and repeated."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from weightlane.trainer.engines.hf.model_dir import ModelInfo

from ..config import RunConfig

_LIBRARIES = ("weightlane", "torch", "vllm", "transformers", "ray", "megatron", "triton")
"""By what is imported: distributions of vLLM for other platforms are called otherwise."""


def about_run(config: RunConfig, model: ModelInfo, config_file: Path) -> dict[str, Any]:
    """Seed, model, engines, versions of libraries, and the commit of the repository that `config_file` is in, as JSON."""
    return {
        "seed": config.run.seed,
        "model": config.model.path,
        "architecture": model.architecture,
        "trainer": config.trainer.engine,
        "checkpoint_engine": config.checkpoint_engine.backend,
        "python": platform.python_version(),
        "libraries": _versions(),
        "commit": _commit(config_file.parent),
    }


def _versions() -> dict[str, str]:
    """By distribution."""
    installed = importlib.metadata.packages_distributions()
    named = sorted({distribution for name in _LIBRARIES for distribution in installed.get(name, ())})
    return {name: importlib.metadata.version(name) for name in named}


def _commit(folder: Path) -> str:
    """With ``-dirty`` behind it where files differ from it; empty where there is no repository, or no git."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],  # noqa: S607 - whichever is there
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
