"""``weightlane new-engine``: the package that it makes. That it passes the suite is held by the guide's test in ``packaging``."""

from __future__ import annotations

import errno
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_refused, run

from weightlane.ckpt_engines import StorageError
from weightlane.cli.engines.new_engine import make_engine_package

TEMPLATES = Path(__file__).parents[2] / "plugins/packages"


@pytest.mark.parametrize(
    ("options", "name", "cased", "template", "group"),
    [
        ("", "carrier_pigeon2", "CarrierPigeon2", "engine", "ckpt_engines"),
        ("--training ", "sprint", "Sprint", "training-engine", "training_engines"),
        ("--rollout ", "talk", "Talk", "rollout-engine", "rollout_engines"),
    ],
)
def test_the_package_is_the_template_under_another_name_and_the_next_commands_are_printed(
    tmp_path: Path, options: str, name: str, cased: str, template: str, group: str
) -> None:
    package = tmp_path / "a new" / "engine"
    result = run("new-engine", *options.split(), name, "--out", str(package))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1:] == [
        f"    python -m pip install -e '{package}[test]'",
        f"    weightlane conformance {options}{name}",
    ]
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*") if path.is_file()}
    module = f"weightlane_{name}"
    assert set(texts) == {"README.md", "pyproject.toml", f"{module}.py", "tests/test_conformance.py"}
    assert [name for name, text in texts.items() if "emplate" in text] == []
    original = TEMPLATES / f"weightlane-{template}-template" / f"weightlane_{template.replace('-', '_')}_template.py"
    assert texts[f"{module}.py"].replace(cased, "Template").replace(name, "template") == original.read_text()
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["name"] == module.replace("_", "-")
    (engine,) = project["entry-points"][f"weightlane.{group}"].items()
    assert engine == (name, f"{module}:{cased}{''.join(map(str.capitalize, template.split('-')))}")


def test_a_name_that_is_none_a_place_in_use_and_an_installed_engine_are_refused(tmp_path: Path) -> None:
    for name in ("Pigeon", "carrier pigeon", "2pigeons", "", "../pigeon", "pigéon"):
        assert_refused("is not a name for an engine", "new-engine", "--out", str(tmp_path / "x"), "--", name)
    assert_refused(f"{tmp_path} already exists", "new-engine", "pigeon", "--out", str(tmp_path))
    assert_refused("'shm' is already installed", "new-engine", "shm", "--out", str(tmp_path / "shm"))
    for kind, name in (("--training", "fsdp2"), ("--rollout", "transformers")):
        assert_refused(f"{name!r} is already installed", "new-engine", kind, name, "--out", str(tmp_path / "x"))
    assert_refused("are two kinds of engines", "new-engine", "--training", "--rollout", "pigeon")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_could_not_be_written_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, *arguments: Any, **more: Any) -> int:
        if path.name == "test_conformance.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", full)
    package = tmp_path / "pigeon"
    with pytest.raises(StorageError, match="No space left"):
        make_engine_package("pigeon", package)
    assert not package.exists()
