"""The layers: cli -> trainer, rollout -> sync -> ckpt_engines -> plugins; trainer and rollout never meet."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_sync_and_engines_need_neither_ray_nor_vllm_nor_transformers(tmp_path: Path) -> None:
    program = (
        "import sys, weightlane.sync, weightlane.ckpt_engines as engines;"
        "registry = engines.CheckpointEngineRegistry();"
        "[registry.engine_class(name) for name in ('gloo', 'nccl', 'hccl', 'shm', 'filesystem')];"
        "import weightlane.rollout, weightlane.trainer, weightlane.plugins;"
        "print(sorted({'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "[]"
