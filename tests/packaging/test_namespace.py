"""Generic folder names never become importable, and a wheel holds every module under ``weightlane``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")


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
        for path in (ROOT / folder).rglob("*.py"):
            if "packages" not in path.relative_to(ROOT / folder).parts:
                assert f"weightlane/{path.relative_to(ROOT)}" in names
        assert f"weightlane/{folder}/py.typed" in names
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"weightlane"}
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import weightlane.plugins\n"
        "from weightlane.cli.commands.new_engine import make_engine_package\n"
        "make_engine_package('pigeon')\n"
        "print(weightlane.plugins.__file__)"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert made.stdout.startswith(str(site)), "not the wheel's but the checkout's"
    assert (tmp_path / "weightlane-pigeon/weightlane_pigeon.py").is_file()
    assert "weightlane/__init__.py" not in names, "weightlane is a namespace that other distributions may join"


def test_the_type_checkers_links_point_at_the_folders() -> None:
    for folder in FOLDERS:
        assert (ROOT / ".ns/weightlane" / folder).resolve() == ROOT / folder
