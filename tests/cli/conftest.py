"""Makes this folder's helper modules importable, and lends it the tiny models and tasks of other folders' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from tiny_run import Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))
