"""The guide for engine authors: every block of code in it runs, outside the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guides/writing-an-engine.md").read_text()
TEMPLATE = ROOT / "plugins/packages/weightlane-engine-template/weightlane_engine_template.py"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for kind, body in _BLOCK.findall(GUIDE) if kind == language]


@pytest.fixture
def machine_of_an_author(tmp_path: Path) -> dict[str, str]:
    """Environment of a virtual environment of its own that sees this one's packages, and does not touch them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=HANG_S)
    (tmp_path / "venv/lib" / f"python3.{sys.version_info.minor}" / "site-packages/outer.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    commands = tmp_path / "venv/bin"
    command = commands / "weightlane"
    # A call that outlives its deadline is noticed late on a busy machine.
    patient = f"EngineConformance.prompt_s = EngineConformance.grace_s = {HANG_S}"
    command.write_text(
        f"#!{commands}/python\nfrom weightlane.ckpt_engines.conformance import EngineConformance\n{patient}\n"
        "from weightlane.cli.main import main\nmain()\n"
    )
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which is how pip spells that it is off
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }


@pytest.mark.exhaustive
def test_from_the_template_to_a_green_suite_and_a_telling_failure(
    tmp_path: Path, machine_of_an_author: dict[str, str]
) -> None:
    make, spoil = blocks("sh")
    where = tmp_path / "elsewhere"
    where.mkdir()
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", make + spoil],
        cwd=where,
        env=machine_of_an_author,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "pigeon conforms" in said
    assert re.search(r"pigeon.*weightlane-pigeon", said), "not in the list of engines"
    assert "as expected" in done.stdout
    assert "was not written from byte 0 on" in said


def test_every_block_of_python_runs(children: Any, tmp_path: Path) -> None:
    names = []
    for number, block in enumerate(blocks("python")):
        names.append(f"block_{number}.py")
        (tmp_path / names[-1]).write_text(block)
    program = "import runpy\n" + "\n".join(f"runpy.run_path({name!r})" for name in names)
    status, _, errors = children.run(["-W", "error", "-c", program], cwd=tmp_path)
    assert status == 0, errors


def test_the_engine_shown_is_the_template_and_its_entry_point_is_what_renaming_makes() -> None:
    assert blocks("python")[0] == TEMPLATE.read_text()
    project = (TEMPLATE.parent / "pyproject.toml").read_text()
    renamed = project.replace("weightlane_engine_template", "weightlane_pigeon").replace("Template", "Pigeon")
    assert blocks("toml") == [
        "\n".join(
            line.replace("template =", "pigeon =")
            for line in renamed.splitlines()
            if "ckpt_engines" in line or "Engine" in line
        )
        + "\n"
    ]


def test_the_checks_that_the_guide_names_exist() -> None:
    from weightlane.ckpt_engines.conformance import EngineConformance

    named = set(re.findall(r"\btest_[a-z_]+[a-z]\b", GUIDE)) - {"test_conformance"}
    assert named
    assert [name for name in named if not hasattr(EngineConformance, name)] == []
