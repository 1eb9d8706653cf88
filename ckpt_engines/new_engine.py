"""Makes a package for a new engine out of the template: what ``weightlane new-engine`` does."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from .errors import ConfigError, StorageError
from .registry import NAME_RULE, CheckpointEngineRegistry, is_engine_name

_PART = "new engine"
_TEMPLATE = ("packages", "weightlane-engine-template")
"""Where the template lies beside `weightlane.plugins`, in a checkout and in the wheel."""
_FILES = ("README.md", "pyproject.toml", "weightlane_engine_template.py", "tests/test_conformance.py")
_TO_RENAME = re.compile(r"weightlane-engine-template|weightlane_engine_template|\btemplate\b|Template")


def make_engine_package(name: str, directory: Path | None = None) -> Path:
    """A package, ready to be installed and to pass the conformance suite, for an engine called `name`.

    Args:
        name: What users will write as ``checkpoint_engine.backend``: see `is_engine_name`.
        directory: Where to; ``weightlane-NAME`` here by default. Must not exist.

    Returns:
        That directory.

    Raises:
        ConfigError: `name` is none, or belongs to an installed engine; or there is something at `directory`.
        StorageError: The files could not be written.
    """
    if not is_engine_name(name):
        raise ConfigError(
            f"{name!r} is not a name for an engine.", part=_PART, hint=f"{NAME_RULE} Such as carrier-pigeon."
        )
    if name in CheckpointEngineRegistry().names():
        raise ConfigError(f"an engine called {name!r} is installed already.", part=_PART, hint="Choose another name.")
    words = re.findall("[a-z0-9]+", name)
    distribution = f"weightlane-{'-'.join(words)}"
    renamed = {
        "weightlane-engine-template": distribution,
        "weightlane_engine_template": distribution.replace("-", "_"),
        "template": name,
        "Template": "".join(word.capitalize() for word in words),
    }

    def renamed_text(text: str) -> str:
        return _TO_RENAME.sub(lambda match: renamed[match[0]], text)

    target = Path(distribution) if directory is None else directory
    source: Traversable = files("weightlane.plugins").joinpath(*_TEMPLATE)
    texts = {renamed_text(file): renamed_text(source.joinpath(file).read_text(encoding="utf-8")) for file in _FILES}
    try:
        target.mkdir(parents=True)
        try:
            for file, text in texts.items():
                (target / file).parent.mkdir(exist_ok=True)
                (target / file).write_text(text, encoding="utf-8")
        except BaseException:  # half a package would be in the way of the next try
            shutil.rmtree(target, ignore_errors=True)
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"{target} exists already.", part=_PART, hint="Choose another place with --directory, or remove it."
        ) from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}.", part=_PART) from error
    return target
