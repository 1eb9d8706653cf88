"""The files of a run: configuration, metrics, saved states, summary.

- ``config.toml``: the resolved configuration
- ``metrics.jsonl``: one line per event, appended on resume
- ``samples.jsonl``: some completions of each step with their rewards, appended on resume
- ``failures.jsonl``: one line per sample or step that failed, with its reason; appended on resume
- ``state/step-<n>/``: a saved state: ``trainer/`` (see `training_state`) and ``loop.json``
- ``state/latest.json``: the step of the newest complete state
- ``model/``: the trained model as a Hugging Face directory, at the end; ``exports/step-<n>/`` during the run.
  ``adapter/``: PEFT's files instead, from ``weightlane sft`` with ``trainer.lora``
- ``state/run.lock``: locked by the program that uses the directory
- ``state/fleet.json``: the replicas while the run trains, and ``state/scale.json``: the last request of ``weightlane scale``
- ``summary.json``, ``curves.png``, and ``logs/`` after a failure
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from weightlane.ckpt_engines import ConfigError, StorageError

_PART = "run directory"
_LOCK = "state/run.lock"
_MADE_BEFORE_A_RUN_BEGINS = frozenset({"config.toml", "state", "logs", "wandb"})
"""Files that may remain of a run that could not start; the next run may use its directory."""
_CHOOSE_ANOTHER = "Another directory is chosen with --set run.dir=..."


class RunDir:
    """A run's directory. Nothing is written until it is `owned`.

    Raises `ConfigError` if it holds a run or other files and `resume` is false, or holds no state and `resume` is true.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self._state = path / "state"
        used = self._names() - _MADE_BEFORE_A_RUN_BEGINS
        latest = self.latest_step()
        if latest is None and (used or resume):
            raise ConfigError(
                f"{path} holds {'files, but ' if used else ''}no saved state to resume from.",
                part=_PART,
                hint=_CHOOSE_ANOTHER if used else "Leave --resume out to begin a new run.",
            )
        if latest is not None and not resume:
            raise ConfigError(
                f"{path} already holds a run, saved at step {latest}.",
                part=_PART,
                hint=f"Go on with it by --resume. {_CHOOSE_ANOTHER}",
            )

    def refuse_taken(self) -> None:
        """Raise the error that `owned` would raise now, and write nothing."""
        refuse_taken(self.path, _LOCK, "run")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Make the directory, and lock it inside the block. Raises `ConfigError` if another program uses it."""
        try:
            self._state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _storage_error(self.path, error) from error
        with alone_in(self.path, _LOCK, "run"):
            with suppress(OSError):  # of a run that was killed
                (self._state / "fleet.json").unlink()
            yield

    def _names(self) -> set[str]:
        try:
            return {path.name for path in self.path.iterdir()}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise _unusable(self.path, error) from None

    def latest_step(self) -> int | None:
        """The step of the last complete state; None when there is none."""
        try:
            return int(json.loads((self._state / "latest.json").read_text())["step"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self._state / 'latest.json'} is damaged: {error}.", part=_PART) from None

    @property
    def has_model(self) -> bool:
        """Whether the trained model was written, or its adapter."""
        return any((self.path / name).is_dir() for name in ("model", "adapter"))

    def saved_steps(self) -> list[int]:
        """The steps of all complete states, in order."""
        complete = self._state.glob("step-*/loop.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in complete)

    def trainer_state(self, step: int) -> Path:
        """Directory of the trainer's part of a state; absolute, because trainer ranks have working directories of their own."""
        return self._state.resolve() / f"step-{step}" / "trainer"

    def begin_state(self, step: int) -> Path:
        """Make an empty directory for a state. Returns the directory inside it that the trainer is to create."""
        directory = self._state / f"step-{step}"
        try:
            shutil.rmtree(directory, ignore_errors=True)  # half-written by a run that died
            directory.mkdir(parents=True)
        except OSError as error:
            raise _storage_error(directory, error) from error
        return self.trainer_state(step)

    def begin_export(self, step: int, *, last: bool, name: str = "model") -> Path:
        """The path at which the trainer is to write the model of `step`; nothing exists there. Absolute, as `trainer_state`."""
        place = self.path.resolve() / (f"{name}.new" if last else f"exports/step-{step}")
        shutil.rmtree(place, ignore_errors=True)
        return place

    def finish_export(self, *, last: bool, name: str = "model") -> None:
        """Rename the last exported model to the directory `name`, replacing that of the resumed run."""
        if last:
            model = self.path / name
            try:
                shutil.rmtree(model, ignore_errors=True)
                self.path.joinpath(f"{name}.new").rename(model)
            except OSError as error:
                raise _storage_error(model, error) from error

    def finish_state(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Add the loop's part and mark the state as complete. Older states are removed, except the previous one."""
        before = self.latest_step()
        self.write_json(f"state/step-{step}/loop.json", loop_state)
        self.write_json("state/latest.json", {"step": step})
        kept = {f"step-{each}" for each in (before, step)}
        for path in self._state.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def loop_state(self, step: int) -> dict[str, Any]:
        """The loop's part of a state."""
        path = self._state / f"step-{step}" / "loop.json"
        try:
            state: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {error}.", part=_PART) from None
        return state

    def write_text(self, name: str, text: str) -> None:
        """Write a file so that it appears completely or not at all."""
        write_whole(self.path / name, text)

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file so that it appears completely or not at all."""
        self.write_text(name, json.dumps(data, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file of a run so that it appears completely or not at all, whoever else writes it. Raises `StorageError`."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _storage_error(path, error) from error


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}.", part=_PART, hint="Free space, or choose another run.dir."
    )


def is_in_use(directory: Path) -> bool:
    """Whether a program of this machine owns the run's directory. Locks of other machines need not be seen here."""
    try:
        with (directory / _LOCK).open(encoding="utf-8") as file, _locked(file, directory, "run"):
            return False
    except ConfigError:
        return True
    except OSError:
        return False


def refuse_taken(directory: Path, lock: str, what: str) -> None:
    """Refuse a directory that `alone_in` would refuse now, or in which nothing can be written. Writes nothing.

    Raises `ConfigError` if another program uses it or its path is not a directory, `StorageError` if it cannot be written.
    """
    path = directory.resolve()
    found = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not found.is_dir():
        raise _unusable(directory, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(found, os.W_OK | os.X_OK):
        raise _storage_error(directory, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        file = (directory / lock).open(encoding="utf-8")
    except OSError:  # nobody has used it before, or `alone_in` will raise the error
        return
    with file, _locked(file, directory, what):
        pass


@contextmanager
def alone_in(directory: Path, lock: str, what: str) -> Iterator[None]:
    """Lock a directory inside the block, by a file in it that holds the owner's process id. The lock ends with the process.

    Raises `ConfigError`, which names the process, if another `what`, such as a ``"run"``, holds the lock, and `StorageError` if
    the file cannot be written.
    """
    try:
        file = (directory / lock).open("a+", encoding="utf-8")
    except OSError as error:
        raise _storage_error(directory, error) from error
    with file, _locked(file, directory, what):
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def _locked(file: TextIO, directory: Path, what: str) -> Iterator[None]:
    """Hold the lock on `file` inside the block. Raises `ConfigError`, which names the process that holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise ConfigError(
            f"another {what} uses {directory}: process {file.read().strip() or 'unknown'}.",
            part=_PART,
            hint="Set run.dir to another directory, or end that process.",
        ) from None
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error.strerror}.", part=_PART, hint=_CHOOSE_ANOTHER)
