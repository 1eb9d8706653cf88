"""The benchmarks, which belong to the checkout and are never installed."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def forked_helpers() -> None:
    """Processes of benchmarks are started as users start them: none is forked."""


def benchmark(name: str) -> Any:
    """A fixture that gives a module of `benchmarks`."""

    @pytest.fixture
    def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT))
        found = importlib.import_module(f"benchmarks.{name}")
        for part in pkgutil.iter_modules(getattr(found, "__path__", ()) if name == "gpu" else ()):
            if part.name != "vllm_replica":  # which takes vLLM's packages
                importlib.import_module(f"benchmarks.{name}.{part.name}")
        return found

    return module


async_against_sync = benchmark("training.async_against_sync")
control_plane = benchmark("sync.control_plane")
density = benchmark("training.density")
figures = benchmark("figures")
gpu = benchmark("gpu")
kills = benchmark("training.kills")
multiples = benchmark("training.multiples")
peers = benchmark("peers.__main__")
versions = benchmark("commit.versions")
