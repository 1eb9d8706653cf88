"""The layers: cli -> trainer, rollout -> sync -> ckpt_engines -> plugins; trainer and rollout never meet."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "plugins": set(),
    "ckpt_engines": {"plugins"},
    "sync": {"ckpt_engines", "plugins"},
    "trainer": {"sync", "ckpt_engines", "plugins"},
    "rollout": {"sync", "ckpt_engines", "plugins"},
    "cli": {"trainer", "rollout", "sync", "ckpt_engines", "plugins"},
}


def imported(path: Path) -> set[str]:
    """Absolute names of everything a module imports, lazily or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_what_stands_below_it(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        if "packages" in path.relative_to(ROOT / folder).parts:
            continue
        layers = {name.split(".")[1] for name in imported(path) if name.startswith("weightlane.")}
        assert layers - {folder} <= MAY_IMPORT[folder], (
            f"{path.relative_to(ROOT)} imports {layers - MAY_IMPORT[folder]}"
        )


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_inside_a_folder_imports_are_relative(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        own = [name for name in imported(path) if name.startswith(f"weightlane.{folder}")]
        assert not own, f"{path.relative_to(ROOT)} imports {own}"


def test_the_loop_knows_the_registry_and_protocols_only() -> None:
    """No engine, no rollout class, no Ray: the loop and what it imports see the world through `trainer/protocols.py`."""
    seen: set[str] = set()
    pending = ["loop"]
    outside: set[str] = set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        path = ROOT / "trainer" / f"{module}.py"
        outside |= imported(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                pending.append(node.module)
    forbidden = ("weightlane.rollout", "weightlane.cli", "ray", "vllm", "transformers")
    assert not [name for name in outside if name.split(".")[0] in forbidden or name.startswith(forbidden[:2])]
    engines = {"torch_distributed", "shm", "filesystem"}
    assert not [
        name for name in outside if name.startswith("weightlane.ckpt_engines.") and name.split(".")[2] in engines
    ]
    assert not seen & {"fsdp2", "rank", "ray_group", "engine"}


BLOCKED = ("ray", "vllm", "transformers")
LIBRARY = ("ckpt_engines", "sync")


@pytest.mark.parametrize("folder", LIBRARY)
def test_the_library_names_neither_ray_nor_vllm_nor_transformers_anywhere(folder: str) -> None:
    """Not inside a function either, and not for the type checker alone; nor is a module imported by a computed name."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & set(BLOCKED), f"{path.relative_to(ROOT)} imports {roots & set(BLOCKED)}"
        quoted = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
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
for name in ("gloo", "nccl", "hccl", "shm", "filesystem"):
    registry.engine_class(name)
import weightlane.rollout, weightlane.trainer, weightlane.plugins
weightlane.rollout.ServerReplica("http://127.0.0.1:8000")
blocked = sorted({name.split(".")[0] for name in sys.modules} & set(BLOCKED))
print(json.dumps({"blocked": blocked, "bare": [name for name in FOLDERS if importlib.util.find_spec(name) is not None]}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a program outside the checkout finds where Ray, vLLM and transformers cannot be imported."""
    program = f"BLOCKED, LIBRARY, FOLDERS = {BLOCKED!r}, {LIBRARY!r}, {tuple(MAY_IMPORT)!r}" + _PROGRAM
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


def test_the_library_and_a_server_replica_work_where_ray_vllm_and_transformers_cannot_be_imported(
    installed: dict[str, list[str]],
) -> None:
    assert installed["blocked"] == []


def test_no_bare_folder_name_is_importable_where_weightlane_is_installed(installed: dict[str, list[str]]) -> None:
    assert installed["bare"] == []
