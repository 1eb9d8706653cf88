"""`AdapterVersions`: which adapter new requests of a replica compute with, where versions are adapters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import CommitError, QuarantinedError


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """A version in the slots of a replica."""

    id: int
    """vLLM's id of the adapter. No two commits of a replica have the same, so that cached blocks of one are never taken for
    those of another."""
    version: int

    def request(self) -> Any:
        """VLLM's ``LoRARequest`` for a request that computes with this version."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - slow to import

        # Nothing reads the path: the adapter is there before its first request. One that is not absolute, vLLM would download.
        return LoRARequest(f"weightlane-{self.id}", self.id, "/weightlane/has-no-files")


class AdapterVersions:
    """The newest committed adapter of one replica, and the one before. All calls come from one event loop.

    Args:
        part: The replica's name.
    """

    def __init__(self, part: str) -> None:
        self._part = part
        self._ids = itertools.count(1)
        self._serving: AdapterVersion | None = None
        self._before: AdapterVersion | None = None

    @property
    def any(self) -> bool:
        """Whether a version has been committed."""
        return self._serving is not None

    def current(self) -> AdapterVersion:
        """The version that a new request computes with. Raises `QuarantinedError` before the first one is committed."""
        if self._serving is None:
            raise QuarantinedError(
                "no version of the adapter has been committed yet.",
                part=self._part,
                hint="It serves once the trainer has published one: with trainer.lora.publish = adapter, the weights of"
                " model.path alone are no version.",
            )
        return self._serving

    def next(self, version: int) -> AdapterVersion:
        """An adapter for a commit that begins."""
        return AdapterVersion(next(self._ids), version)

    def fields(self, serving: AdapterVersion, in_flight: Iterable[int]) -> dict[str, Any]:
        """The fields of an `UpdateRequest` after which `serving` serves; `in_flight` are the ids that requests compute with.

        Also the version that serves now stays: requests begin under it until the update is known to have succeeded, and a
        rollback returns to it.
        """
        kept = {*in_flight, *(each.id for each in (self._serving,) if each is not None)}
        return {"adapter": serving.id, "in_use": sorted(kept)}

    def committed(self, made: AdapterVersion) -> None:
        """Let new requests compute with `made`."""
        self._before, self._serving = self._serving, made

    def previous(self, version: int) -> AdapterVersion:
        """The adapter to which a rollback of `version` returns. Raises `CommitError` if there is none."""
        if self._before is None:
            raise CommitError(
                f"version {version} cannot be rolled back: no adapter was committed before it.", part=self._part
            )
        return self._before

    def rolled_back(self) -> None:
        """Let new requests compute with the version before."""
        self._before, self._serving = None, self._before
