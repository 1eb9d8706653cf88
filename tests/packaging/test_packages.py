"""The third-party packages: separately installed, found by entry point, made of public parts only."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from syntax_trees import nodes_of

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.trainer import training_engine_class

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "plugins/packages").glob("*/pyproject.toml"))
PUBLIC = (
    "weightlane.ckpt_engines",
    "weightlane.ckpt_engines.toolkit",
    "weightlane.ckpt_engines.conformance",
    "weightlane.sync",
    "weightlane.trainer",
    "weightlane.trainer.conformance",
)
TEMPLATE = ROOT / "plugins/packages/weightlane-engine-template/weightlane_engine_template.py"
TRAINING_TEMPLATE = TEMPLATE.parents[1] / "weightlane-training-engine-template/weightlane_training_engine_template.py"


@pytest.fixture(params=PACKAGES, ids=lambda path: path.name)
def package(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_are_a_template_for_each_kind_of_engine_and_two_engines_over_other_peoples_transports() -> None:
    assert {path.name for path in PACKAGES} == {
        "weightlane-engine-template",
        "weightlane-mooncake",
        "weightlane-nixl",
        "weightlane-training-engine-template",
    }
    assert len(TEMPLATE.read_text().splitlines()) < 60
    assert len(TRAINING_TEMPLATE.read_text().splitlines()) < 200


def test_a_package_is_installed_and_its_engine_found_by_entry_point(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    rows = {row.name: row for row in CheckpointEngineRegistry().list()}
    for name, value in project["entry-points"].get("weightlane.training_engines", {}).items():
        engine = training_engine_class(name)
        assert f"{engine.__module__}:{engine.__qualname__}" == value
    for name in project["entry-points"].get("weightlane.ckpt_engines", ()):
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


def test_a_package_explains_itself_and_is_tested_by_the_conformance_suite(package: Path) -> None:
    assert len((package / "README.md").read_text().splitlines()) > 20
    assert "Conformance):" in (package / "tests/test_conformance.py").read_text()
