"""The layers: cli -> trainer, rollout -> sync -> ckpt_engines -> plugins; trainer and rollout never meet."""

from __future__ import annotations

import ast
import functools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from syntax_trees import nodes_of

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "plugins": set(),
    "ckpt_engines": {"plugins"},
    "sync": {"ckpt_engines", "plugins"},
    "trainer": {"sync", "ckpt_engines", "plugins"},
    "rollout": {"sync", "ckpt_engines", "plugins"},
    "cli": {"trainer", "rollout", "sync", "ckpt_engines", "plugins"},
}


@functools.cache
def imported(path: Path) -> set[str]:
    """Absolute names of everything a module imports, lazily or not."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_type_checkers_links_give_the_folders_the_names_that_they_have_in_the_wheel() -> None:
    for folder in MAY_IMPORT:
        assert (ROOT / ".ns/weightlane" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("folder", [*MAY_IMPORT, "tests", "examples", "benchmarks"])
def test_a_folder_imports_what_stands_below_it_by_its_full_name_and_its_own_modules_relatively(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        names = imported(path)
        bare = {name.split(".")[0] for name in names} & MAY_IMPORT.keys()
        assert not bare, f"{path.relative_to(ROOT)} imports {bare}"
        if folder in MAY_IMPORT and "packages" not in path.relative_to(ROOT / folder).parts:
            above = {name.split(".")[1] for name in names if name.startswith("weightlane.")} - MAY_IMPORT[folder]
            assert not above, f"{path.relative_to(ROOT)} imports {above}"


def test_the_loop_knows_the_registry_and_protocols_only() -> None:
    """No engine, no rollout class, no Ray: the loop and what it imports see the world through `trainer/loop/protocols.py`."""
    start = ROOT / "trainer/loop/loop.py"
    seen: set[Path] = set()
    pending, outside = {start}, set[str]()
    while pending:
        seen |= {path := pending.pop()}
        outside |= imported(path)
        pending |= relative(path) - seen
    assert ROOT / "trainer/loop/protocols.py" in seen
    forbidden = ("weightlane.rollout", "weightlane.cli", "ray", "vllm", "transformers")
    assert not [name for name in outside if name.split(".")[0] in forbidden or name.startswith(forbidden[:2])]
    assert not [name for name in outside if name.startswith("weightlane.ckpt_engines.engines")]
    rooms = {path.relative_to(ROOT / "trainer").parts[0] for path in seen}
    assert not rooms & {"placement", "runner"}
    engines = {str(path.relative_to(ROOT / "trainer/engines")) for path in seen if "engines" in path.parts}
    assert engines <= {"__init__.py"}, "the loop knows no training engine"


def test_only_the_conformance_command_needs_pytest() -> None:
    """pytest is an extra: importing anything of the suite without it fails."""
    importing = {
        str(path.relative_to(ROOT))
        for folder in MAY_IMPORT
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "packages" not in path.parts
        and "conformance" not in path.relative_to(ROOT).parts[:2]
        and any(f"{suite}.conformance" in name for name in imported(path) for suite in ("ckpt_engines", "trainer"))
    }
    assert importing == {"cli/engines/conformance.py"}


def relative(path: Path) -> set[Path]:
    """Modules that a module imports relatively, or for its types."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [base / alias.name for alias in node.names]
            places = [base.with_suffix(".py"), base / "__init__.py", *(each.with_suffix(".py") for each in names)]
            found |= {place for place in places if place.is_file()}
    return found


BLOCKED = ("ray", "vllm", "transformers")
LIBRARY = ("ckpt_engines", "sync")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = tuple(PROJECT["entry-points"]["weightlane.ckpt_engines"])


@pytest.mark.parametrize("folder", LIBRARY)
def test_the_library_names_neither_ray_nor_vllm_nor_transformers_anywhere(folder: str) -> None:
    """Not inside a function either, and not for the type checker alone; nor is a module imported by a computed name."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & set(BLOCKED), f"{path.relative_to(ROOT)} imports {roots & set(BLOCKED)}"
        quoted = {node.value for node in nodes_of(path) if isinstance(node, ast.Constant)}
        assert not quoted & set(BLOCKED), f"{path.relative_to(ROOT)} names {quoted & set(BLOCKED)}"


_PROGRAM = """
import importlib, importlib.util, json, pathlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
for folder in LIBRARY:
    (home,) = importlib.import_module(f"weightlane.{folder}").__path__
    for path in sorted(pathlib.Path(home).rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        importlib.import_module(".".join(("weightlane", folder, *parts)).removesuffix(".__init__"))
registry = sys.modules["weightlane.ckpt_engines"].CheckpointEngineRegistry()
for name in ENGINES:
    registry.engine_class(name)
import weightlane.rollout, weightlane.trainer, weightlane.plugins
weightlane.rollout.ServerReplica("http://127.0.0.1:8000")
blocked = sorted({name.split(".")[0] for name in sys.modules} & set(BLOCKED))
print(json.dumps({"blocked": blocked, "bare": [name for name in FOLDERS if importlib.util.find_spec(name) is not None]}))
"""


def test_without_ray_vllm_and_transformers_the_library_and_a_server_replica_work_and_no_bare_folder_is_importable(
    children: Any, tmp_path: Path
) -> None:
    """In a program outside the checkout."""
    values = BLOCKED, LIBRARY, ENGINES, tuple(MAY_IMPORT)
    program = f"BLOCKED, LIBRARY, ENGINES, FOLDERS = {values!r}" + _PROGRAM
    status, output, errors = children.run(["-c", program], cwd=tmp_path)
    assert status == 0, errors
    assert json.loads(output) == {"blocked": [], "bare": []}
