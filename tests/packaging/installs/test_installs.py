"""An installation, bare or with an extra, imports what README promises; a command that lacks a library says what to install."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import installation_probe
import pytest
from bare_environment import Installed, make_environment, requirements_of
from test_declared_imports import EXTRAS
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.engines.filesystem.store_directory import StoreDirectory

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")
COMMANDS = ("engines", "doctor", "new-engine", "conformance", "bench", "layout", "plan", "plan-shape", "config")
COMMANDS += ("export", "check", "train", "sft", "tinker", "report")
LIGHT: Mapping[tuple[str, ...], tuple[int, str]] = {
    ("--help",): (0, "Usage: weightlane"),
    ("--version",): (0, r"weightlane \d+\.\d+\.\d+\n$"),
    ("no-such-command",): (2, "Usage: weightlane"),
    ("train",): (2, "Usage: weightlane train"),
    ("serve", "service.toml"): (2, "'weightlane tinker CONFIG'"),
    ("train", "nowhere.toml"): (2, r"error: configuration: there is no configuration file nowhere\.toml\.\n$"),
    **{(command, "--help"): (0, f"Usage: weightlane {command}") for command in COMMANDS},
}
"""Commands that import nothing that takes time, with the exit code and a pattern of the output of each."""
HELPED = ("", "vllm")
"""Extras of the smallest installation and of the largest, in which these are run."""
EXPORT = ("export", "run", "--out", "new")
TENSORBOARD = ("config", "rl.toml", "--set", "observers.tensorboard=board")
LACKING = {
    ("train", "rl.toml"): ("ray", "vllm"),
    ("sft", "sft.toml"): ("ray",),
    ("tinker", "service.toml"): ("service", "vllm"),
    ("check", "rl.toml"): ("ray", "vllm"),
    ("check", "sft.toml"): ("ray",),
    ("check", "service.toml"): ("service", "vllm"),
    ("plan", "rl.toml"): ("vllm",),
    ("layout", "model"): ("vllm",),
    EXPORT: ("hf",),
    ("conformance", "shm"): ("conformance",),
    ("conformance", "fsdp2"): ("conformance", "hf"),
    ("conformance", "--training", "file.py:Engine"): ("conformance", "hf"),
    ("conformance", "transformers"): ("conformance", "hf"),
    ("bench", "--out", "x.png"): ("plot",),
}
"""Commands as a user types them, and the extras that README says they need. Each of them says so before it loads anything."""
WORKING: Mapping[str, Mapping[tuple[str, ...], tuple[int, str]]] = {
    "": {
        ("engines",): (0, "shm"),
        ("config", "rl.toml"): (0, "[checkpoint_engine]"),
        ("new-engine", "pigeon"): (0, "passes the conformance suite"),
        ("doctor", "vllm"): (2, "pip install 'weightlane[vllm]'"),
        ("plan-shape", "30b"): (0, "busiest"),
        ("report", "run"): (2, "is not the directory of a run"),
        ("bench", "--receivers", "1", "--rounds", "1"): (0, "shm"),
        TENSORBOARD: (2, "pip install 'weightlane[observability]'"),
        ("config", "rl.toml", "--set", "observers.wandb=p"): (2, "pip install 'weightlane[trackers]'"),
    },
    "hf": {EXPORT: (2, "run is not the directory of a run")},
    "server": {EXPORT: (2, "run is not the directory of a run")},
    "ray": {
        ("sft", "sft.toml"): (2, "there is no model directory"),
        ("sft", "sft.toml", "--set", "trainer.engine=megatron"): (2, "pip install 'weightlane[megatron]'"),
        ("bench", "--out", "x.nothing"): (2, "does not end with a format"),
    },
    "vllm": {
        ("plan", "rl.toml"): (2, "there is no model directory"),
        ("layout", "nowhere"): (2, "is neither a directory nor a model that was downloaded before"),
        ("layout", "model"): (2, "does not exist"),
    },
    "conformance": {("conformance", "shm", "--check", "none"): (2, "there is no check called none")},
    "observability": {TENSORBOARD: (0, 'tensorboard = "board"')},
    "trackers": {("config", "rl.toml", "--set", "observers.wandb=p"): (0, 'wandb = "p"')},
}
"""Commands in an installation with the extra that they need, with the exit code and a part of the output of each."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel that the source distribution makes, which is built from links, to keep the build out of the checkout."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    for name in (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
        timeout=HANG_S,
    )
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "wheel")
    return folder / "wheel"


def test_the_wheel_of_the_source_distribution_holds_what_the_checkout_does_and_nothing_else(wheel: Path) -> None:
    """Weightlane is a namespace without a module of its own, which other distributions may join."""
    expected = {"cli/report/page_files/" + path.name for path in (ROOT / "cli/report/page_files").iterdir()}
    for folder in FOLDERS:
        expected |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py") if path.parts[-3] != "tests"}
        expected.add(f"{folder}/py.typed")
    expected = {name for name in expected if not name.startswith("plugins/packages/")}
    for template in (ROOT / "plugins/packages").glob("*-template"):
        files = [
            template / "README.md",
            template / "pyproject.toml",
            *template.glob("*.py"),
            *template.glob("tests/*.py"),
        ]
        expected |= {str(path.relative_to(ROOT)) for path in files}
    made = wheel / "weightlane"
    assert {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()} == expected
    assert all((made / name).read_bytes() == (ROOT / name).read_bytes() for name in expected)
    assert sorted(path.name.split("-")[0] for path in wheel.iterdir()) == ["weightlane", "weightlane"]


def test_a_store_on_s3_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # if another test has used it
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3\. pip install 'weightlane\[fs\]' has S3"):
        StoreDirectory("s3://no/where")


@pytest.fixture(scope="module")
def installed() -> Installed:
    return Installed()


@pytest.fixture(scope="module")
def closures(wheel: Path, installed: Installed) -> dict[str, set[str]]:
    """The distributions of an installation with each extra."""
    requirements = requirements_of(wheel)
    return {extra: installed.closure(requirements, extra) for extra in EXTRAS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the examples' configurations, whose models are not there."""
    for name, example in (("rl", "arithmetic/arithmetic"), ("sft", "arithmetic/sft"), ("service", "tinker/service")):
        shutil.copy(ROOT / f"examples/{example}.toml", tmp_path / f"{name}.toml")
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path


def promised_packages() -> dict[str, list[str]]:
    """Packages by extra, as the table in README says."""
    section = (ROOT / "README.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ?([^|]*) ?\|$", section, re.MULTILINE)
    found: dict[str, list[str]] = {}
    for names, packages in rows[1:]:
        for extra in re.findall(r"`(\w+)`", names) or [""]:
            found[extra] = re.findall(r"`([\w.]+)`", packages)
    return found


PROMISED = promised_packages()


def test_readme_names_every_extra() -> None:
    assert PROMISED.keys() == EXTRAS.keys()
    assert len(PROMISED[""]) > 5


@pytest.mark.parametrize(
    ("extra", "imports_vllm"),
    [
        *(
            pytest.param(extra, False, id=extra or "none", marks=pytest.mark.exhaustive if extra else ())
            for extra in EXTRAS
            if PROMISED[extra] or extra in WORKING
        ),  # the extra "server" contains "hf"
        pytest.param("vllm", True, id="vllm, imported", marks=pytest.mark.exhaustive),
    ],
)
def test_an_installation_imports_its_packages_and_every_command_works_or_says_what_to_install(
    extra: str,
    imports_vllm: bool,
    wheel: Path,
    installed: Installed,
    closures: Mapping[str, set[str]],
    folder: Path,
) -> None:
    names = closures[extra]
    python = make_environment(folder / "env", wheel, installed, names)
    complete = {each for each in EXTRAS if each and closures[each] <= names}
    lacking = {command: [each for each in extras if each not in complete] for command, extras in LACKING.items()}
    refused = [command for command, extras in lacking.items() if extras]
    working = WORKING.get(extra, {})
    packages = PROMISED[extra]
    if extra == "vllm" and not imports_vllm:
        packages = ["weightlane.rollout.vllm.plugin"]
    light = LIGHT if extra in HELPED else {}
    asked = {"light": list(light), "refused": refused, "working": list(working), "imports": packages}

    ended = subprocess.run(
        [python, "-I", installation_probe.__file__],
        input=json.dumps(asked),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)

    assert told["origin"].startswith(str(folder / "env")), "weightlane is not that of the environment"
    assert not told["heavy"], "help or a refusal has imported what takes time"
    assert not told["vllm"], "what can be said without vLLM has imported it"
    for (command, (code, pattern)), result in zip(light.items(), told["light"], strict=True):
        assert result["code"] == code, command
        assert re.search(pattern, result["output"]), (command, result["output"])
    for command, result in zip(refused, told["refused"], strict=True):
        (line,) = result["output"].splitlines()
        assert result["code"] == 2, line
        wanted = ",".join(lacking[command])
        assert re.fullmatch(
            rf"error: [\w -]+: .* (is|are) not installed\. .*pip install 'weightlane\[{wanted}\]'\.", line
        )
        assert "None" not in line
    for (command, (code, part)), result in zip(working.items(), told["working"], strict=True):
        assert result["code"] == code, (command, result["output"])
        assert part in result["output"], command
        assert "Traceback" not in result["output"], result["output"]
    assert not [error for error in told["imports"] if error], told["imports"]
