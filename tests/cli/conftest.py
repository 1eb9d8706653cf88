"""Makes a tiny model and its tasks."""

from __future__ import annotations

import pytest
from tiny_run import Material, make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model, its tokenizer and its tasks."""
    return make_material(tmp_path_factory.mktemp("material"))
