"""`Checkpoints`: the saved models of clients, adapters as PEFT's files or all weights, under ``tinker://`` paths."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig
from ..errors import UnknownError
from ..wire.names import CheckpointPath
from ..wire.names import Kind as Segment
from .store import Store

Kind = Literal["training", "sampler", "external"]
_SEGMENTS: Mapping[Kind, Segment] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
_PART = "service checkpoints"
_DELETE = "DELETE FROM checkpoints WHERE path = ?"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved adapter, or saved weights of the full model."""

    path: str
    """``tinker://MODEL/weights/NAME``, with the optimizer; ``tinker://MODEL/sampler_weights/NAME``, or ``external_weights``,
    without."""
    model: str
    kind: Kind
    directory: Path
    created: float
    """Seconds since 1970."""
    expires: float | None
    bytes: int
    about: Mapping[str, Any]
    """The adapter's configuration (None for all weights), base model, trained layers, the client's remarks, and its request."""

    @property
    def id(self) -> str:
        """The part of the path after the model."""
        return self.path.removeprefix(f"tinker://{self.model}/")

    @property
    def config(self) -> LoraConfig | None:
        """The adapter's configuration; None for all weights."""
        found = self.about["config"]
        return None if found is None else LoraConfig.model_validate(found)


class Checkpoints:
    """The checkpoints of all clients, each in a directory of its own below `directory`, listed in `store`."""

    def __init__(self, store: Store, directory: Path) -> None:
        self._store, self._directory = store, directory
        directory.mkdir(parents=True, exist_ok=True)

    def place(self, model: str, kind: Kind, name: str, seq: int) -> tuple[str, Path]:
        """Path and directory of a checkpoint that request `seq` of a model is about to make; `name` fits `wire.names.NAME`."""
        path = CheckpointPath(model, _SEGMENTS[kind], name)
        # Not the directory of an earlier checkpoint of that name, which stays until this one is complete.
        return str(path), self._directory / model.replace(":", ".") / path.kind / f"{name}~{seq}"

    def prepare(self, path: str, directory: Path, *, overwrite: bool) -> None:
        """Clear the directory of a new checkpoint. Raises `ConfigError` if `path` exists and may not be overwritten."""
        if not overwrite and self._rows("path = ?", path):
            raise ConfigError(
                f"there is a checkpoint {path} already.",
                part=_PART,
                hint="Choose another name, or pass overwrite=True.",
            )
        shutil.rmtree(directory, ignore_errors=True)  # files of a killed process
        directory.parent.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        path: str,
        model: str,
        client: str,
        kind: Kind,
        directory: Path,
        about: Mapping[str, Any],
        ttl_s: float | None = None,
    ) -> None:
        """Record a checkpoint whose files are complete. It replaces an earlier one of the same path."""
        before = self._rows("path = ?", path)
        now, size = time.time(), sum(file.stat().st_size for file in directory.iterdir())
        with self._store.transaction():
            self._store.change(_DELETE, path)
            self._store.insert(
                "checkpoints",
                path=path,
                model=model,
                client=client,
                kind=kind,
                directory=str(directory),
                created=now,
                expires=None if ttl_s is None else now + ttl_s,
                bytes=size,
                about=dict(about),
            )
        for old in before:
            shutil.rmtree(old.directory, ignore_errors=True)

    def get(self, path: str, client: str) -> Checkpoint:
        """The checkpoint at `path`. Raises `UnknownError` if `client` has none there."""
        found = self._rows("path = ? AND client = ? AND (expires IS NULL OR expires > ?)", path, client, time.time())
        if not found or not found[0].directory.is_dir():
            raise UnknownError(
                f"there is no checkpoint {path}.", part=_PART, hint="It may have expired, or been deleted."
            )
        return found[0]

    def made_by(self, request: str) -> Checkpoint | None:
        """The checkpoint that a request made; None if there is none."""
        found = self._rows("json_extract(about, '$.request') = ?", request)
        return found[0] if found else None

    def of_client(self, client: str, model: str | None = None) -> list[Checkpoint]:
        """The checkpoints of a client, or of one of its models, newest first, without unnamed snapshots."""
        return self._rows(
            "json_extract(about, '$.unnamed') IS NULL"
            " AND client = ? AND (? IS NULL OR model = ?) AND (expires IS NULL OR expires > ?) ORDER BY created DESC",
            client,
            model,
            model,
            time.time(),
        )

    def delete(self, path: str, client: str) -> None:
        """Delete a checkpoint and its files."""
        found = self.get(path, client)
        self._store.change(_DELETE, path)
        shutil.rmtree(found.directory, ignore_errors=True)

    def set_ttl(self, path: str, client: str, ttl_s: float | None) -> None:
        """Let a checkpoint expire in `ttl_s` seconds from now, or never."""
        self.get(path, client)
        self._store.update("checkpoints", path, expires=None if ttl_s is None else time.time() + ttl_s)

    def used(self, path: str, kept_s: float) -> None:
        """Keep an unnamed snapshot, which belongs to one sampler, for `kept_s` seconds from now."""
        query = "UPDATE checkpoints SET expires = ? WHERE path = ? AND json_extract(about, '$.unnamed') = 1"
        self._store.change(query, time.time() + kept_s, path)

    def drop_expired(self) -> int:
        """Delete expired checkpoints. Returns their number."""
        expired = self._rows("expires IS NOT NULL AND expires <= ?", time.time())
        for each in expired:
            self._store.change(_DELETE, each.path)
            shutil.rmtree(each.directory, ignore_errors=True)
        return len(expired)

    def _rows(self, condition: str, *values: Any) -> list[Checkpoint]:
        query = "SELECT path, model, kind, directory, created, expires, bytes, about FROM checkpoints WHERE "
        return [
            Checkpoint(**{**row, "directory": Path(row["directory"])})
            for row in self._store.rows(query + condition, *values)
        ]
