"""Makes weightlane importable from the checkout, without pip and without network, and says in words what else is missing."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")
"""Folders of the checkout that become subpackages of `weightlane`; the same list is in `setup.py`."""
PACKAGES = ROOT / ".cache" / "gpu-packages"
"""Where packages are found that were brought here from another machine."""
OLDEST_TORCH = (2, 9)


def make_importable(folder: Path) -> None:
    """Fill `folder` with what a directory of sys.path needs: the namespace package, and metadata with the entry points."""
    namespace = folder / "weightlane"
    namespace.mkdir(parents=True)
    for name in FOLDERS:
        (namespace / name).symlink_to(ROOT / name, target_is_directory=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / f"weightlane-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: weightlane\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), "")
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def what_is_missing(facts: Mapping[str, Any]) -> list[str]:
    """Sentences that say what to do before anything can run; none when nothing is missing."""
    said = []
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not facts["torch"]:
        said.append(
            f"torch cannot be imported ({facts['torch_missing']}): name a Python that has it, built for CUDA,"
            " with make gpu PYTHON=..."
        )
    elif version_of(facts["torch"]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        said.append(f"torch is {facts['torch']}, and weightlane needs {oldest} or newer.")
    elif not facts["cuda"]:
        said.append(
            f"torch {facts['torch']} was built without CUDA: name a Python with another one, with make gpu PYTHON=..."
        )
    elif not facts["devices"]:
        said.append(
            f"torch {facts['torch']} sees no CUDA device: look at nvidia-smi, at CUDA_VISIBLE_DEVICES, and whether the"
            f" driver is new enough for CUDA {facts['cuda']}."
        )
    if missing := facts["missing"]:
        names = " ".join(missing)
        why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        said.append(
            f"These packages cannot be imported: {why}.\n"
            f"  With network:    {python} -m pip install {names}\n"
            f"  Without network: on a machine with network, the same Python ({python}) and the same kind of processor:\n"
            f"                   {python} -m pip install --target .cache/gpu-packages {names}\n"
            "                   and copy that folder to .cache/gpu-packages of this checkout, where make gpu looks for it."
        )
    return said


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version such as ``2.11.0+cu130``."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
