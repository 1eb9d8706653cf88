"""The third-party packages: separately installed, found by entry point, made of public parts only."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from syntax_trees import nodes_of

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.rollout.contract.registry import registered_rollout_engine
from weightlane.trainer import training_engine_class
from weightlane.trainer.loop.environments.registry import environment_class

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "plugins/packages").glob("*/pyproject.toml"))
PUBLIC = (
    "weightlane.ckpt_engines",
    "weightlane.ckpt_engines.toolkit",
    "weightlane.ckpt_engines.conformance",
    "weightlane.rollout",
    "weightlane.rollout.conformance",
    "weightlane.rollout.engine_toolkit",
    "weightlane.sync",
    "weightlane.trainer",
    "weightlane.trainer.conformance",
    "weightlane.trainer.loop.environments",
)


@pytest.fixture(params=PACKAGES, ids=lambda path: path.name)
def package(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_a_package_is_installed_and_its_engine_found_by_entry_point(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    rows = {row.name: row for row in CheckpointEngineRegistry().list()}
    for group, find in (
        ("training_engines", training_engine_class),
        ("rollout_engines", registered_rollout_engine),
        ("environments", environment_class),
    ):
        for name, value in project.get("entry-points", {}).get(f"weightlane.{group}", {}).items():
            engine = find(name)
            assert f"{engine.__module__}:{engine.__qualname__}" == value
    for name in project.get("entry-points", {}).get("weightlane.ckpt_engines", ()):
        assert name in rows, f"{package.name} is not installed: run make setup"
        assert rows[name].distribution == f"{project['name']} {project['version']}"
        assert rows[name].capabilities is not None, rows[name].unavailable


def test_a_package_imports_public_modules_of_weightlane_only(package: Path) -> None:
    modules = [path for path in package.rglob("*.py") if "build" not in path.relative_to(package).parts]
    assert modules
    for path in modules:
        for node in nodes_of(path):
            found = []
            if isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [(node.module or "", alias.name) for alias in node.names]
            for module, name in found:
                if module.split(".")[0] == "weightlane":
                    assert module in PUBLIC, f"{path}:{node.lineno} imports {module}"
                    assert not name.startswith("_"), f"{path}:{node.lineno} imports {name}"
