"""Generic folder names never become importable, and a wheel holds every module under ``weightlane``."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")
NOT_SHIPPED = ("packages",)


def modules(folder: str) -> list[Path]:
    return [
        path
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not set(path.relative_to(ROOT / folder).parts[:-1]) & {*NOT_SHIPPED, "__pycache__"}
    ]


@pytest.mark.parametrize("folder", [*FOLDERS, "tests", "examples", "benchmarks"])
def test_no_module_imports_a_bare_folder_name(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            bare = [name for name in names if name.split(".")[0] in FOLDERS]
            assert not bare, f"{path.relative_to(ROOT)}:{node.lineno} imports {bare}"


def test_the_wheel_holds_every_module_and_nothing_beside_weightlane(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        # Links keep the build's own files (build/, egg-info) out of the checkout.
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
        timeout=HANG_S,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in FOLDERS:
        for path in modules(folder):
            assert f"weightlane/{folder}/{path.relative_to(ROOT / folder)}" in names
        assert f"weightlane/{folder}/py.typed" in names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"weightlane"}
    assert "weightlane/__init__.py" not in names, "weightlane is a namespace that other distributions may join"


def test_the_type_checkers_links_point_at_the_folders() -> None:
    for folder in FOLDERS:
        assert (ROOT / ".ns/weightlane" / folder).resolve() == ROOT / folder
