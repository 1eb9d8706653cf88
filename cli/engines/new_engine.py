"""``weightlane new-engine``: makes a package for a new engine from a template."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from weightlane.ckpt_engines.errors import ConfigError, StorageError
from weightlane.ckpt_engines.registered_class import registered_names
from weightlane.ckpt_engines.registry import NAME_RULE, is_engine_name

from ..extras import ENGINE_GROUPS

_PART = "new engine"
_TEMPLATES = {
    "checkpoint": "weightlane-engine-template",
    "training": "weightlane-training-engine-template",
    "rollout": "weightlane-rollout-engine-template",
}
"""Folder of each kind's template in ``packages`` under `weightlane.plugins`, in a checkout and in the wheel."""


def make_engine_package(name: str, directory: Path | None = None, kind: str = "checkpoint") -> Path:
    """Make a package for an engine called `name`, and return its directory. It passes the conformance suite as it is.

    `name` is what users will write as ``checkpoint_engine.backend`` or, for the `kind` ``"training"`` or ``"rollout"``, as
    ``trainer.engine`` or ``rollout.engine``; see `is_engine_name`. The new `directory` is ``weightlane-NAME`` in the current one
    by default.

    Raises:
        ConfigError: `name` is not an engine's name, an engine of that name is installed, or `directory` exists.
        StorageError: The files could not be written; nothing is left of them.
    """
    if not is_engine_name(name):
        raise ConfigError(
            f"{name!r} is not a name for an engine.", part=_PART, hint=f"{NAME_RULE} Example: carrier-pigeon."
        )
    if name in registered_names(ENGINE_GROUPS[kind]):
        raise ConfigError(f"an engine called {name!r} is already installed.", part=_PART, hint="Choose another name.")
    template = _TEMPLATES[kind]
    module = template.replace("-", "_")
    words = re.findall("[a-z0-9]+", name)
    distribution = f"weightlane-{'-'.join(words)}"
    renamed = {
        template: distribution,
        module: distribution.replace("-", "_"),
        "template": name,
        "Template": "".join(word.capitalize() for word in words),
    }

    to_rename = re.compile(rf"{template}|{module}|\btemplate\b|Template")

    def renamed_text(text: str) -> str:
        return to_rename.sub(lambda match: renamed[match[0]], text)

    target = Path(distribution) if directory is None else directory
    source: Traversable = files("weightlane.plugins").joinpath("packages", template)
    names = ("README.md", "pyproject.toml", f"{module}.py", "tests/test_conformance.py")
    texts = {renamed_text(file): renamed_text(source.joinpath(file).read_text(encoding="utf-8")) for file in names}
    try:
        target.mkdir(parents=True)
        try:
            for file, text in texts.items():
                (target / file).parent.mkdir(exist_ok=True)
                (target / file).write_text(text, encoding="utf-8")
        except BaseException:  # an incomplete package would make the next attempt fail
            shutil.rmtree(target, ignore_errors=True)
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"{target} already exists.", part=_PART, hint="Choose another --out, or remove it."
        ) from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}.", part=_PART) from error
    return target
