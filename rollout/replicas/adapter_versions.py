"""`AdapterVersions`: which adapters requests of a replica may compute with, where versions are adapters."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from weightlane.ckpt_engines import CommitError, ConfigError, QuarantinedError

from ..config import AdapterConfig
from ..contract.requests import AdapterVersion
from ..layout.loading.adapter_tensors import announced_layers


class AdapterVersions:
    """The adapters of one replica that requests can name by their versions, the newest one, and the one before.

    A version is dropped by the commit after which it is neither the newest nor one to keep. Requests in flight end with it, but
    none begins once that commit has begun, since one that reached vLLM too late would end the engine. The one before the newest
    stays loaded for a rollback. All calls come from one event loop.

    Args:
        part: The replica's name.
        adapter: The adapter that versions are sent as; None where versions are weights.
        base: The version of the model's weights, which all adapters are for.
    """

    def __init__(self, part: str, adapter: AdapterConfig | None, base: int) -> None:
        self._part = part
        self._adapter = adapter
        self._base = AdapterVersion(0, base)
        self._ids = itertools.count(1)
        self._serving: AdapterVersion | None = None
        self._before: AdapterVersion | None = None
        self._named: dict[int, AdapterVersion] = {}
        """The adapters that requests can name, by version."""
        self._undo: dict[int, AdapterVersion] = {}
        """`_named` before the update that runs."""
        self._announced: dict[int, tuple[AdapterConfig, frozenset[int]]] = {}
        """The adapter that a version will be, and the other versions that requests may then still name, by version."""

    @property
    def ready(self) -> bool:
        """Whether requests that name no adapter are accepted: a version has been committed, or versions are weights."""
        return self._adapter is None or self._serving is not None

    def of_request(self, wanted: int | None) -> AdapterVersion | None:
        """The adapter for a new request: the newest for None, none for 0, else that version. None where versions are weights.

        Raises:
            ConfigError: The version is not loaded, or versions are weights.
            QuarantinedError: The newest is wanted, and none has been committed.
        """
        if self._adapter is None:
            if wanted:
                raise ConfigError(f"adapter {wanted} was asked for, and versions are weights.", part=self._part)
            return None
        if wanted is None:
            if self._serving is None:
                raise QuarantinedError(
                    "no version of the adapter has been committed yet.",
                    part=self._part,
                    hint="It serves once the trainer has published one: with trainer.lora.publish = adapter, the weights of"
                    " model.path alone are no version.",
                )
            return self._serving
        if wanted == 0:
            return self._base
        if wanted not in self._named:
            loaded = ", ".join(map(str, sorted(self._named))) or "none"
            raise ConfigError(
                f"adapter {wanted} is not loaded; loaded are {loaded}.",
                part=self._part,
                hint="Publish it again under a new version, and name it in `keep` of later announcements.",
            )
        return self._named[wanted]

    def announce(self, version: int, adapter: AdapterConfig, keep: Collection[int], layers: Collection[str]) -> None:
        """Note what `version` will be, in place of an earlier announcement. `layers` are those whose A and B are sent.

        Raises:
            ConfigError: No version can be that adapter, or the version has been committed.
        """
        if self._adapter is None:
            raise ConfigError(
                f"version {version} was announced as an adapter, and versions are weights.",
                part=self._part,
                hint='Set trainer.lora.publish to "adapter".',
            )
        if self._serving is not None and version <= self._serving.version:
            raise ConfigError(
                f"version {version} was announced after version {self._serving.version} was committed.",
                part=self._part,
                hint="Announce a version before it is published.",
            )
        announced_layers(layers, self._adapter, adapter)
        self._announced[version] = adapter, frozenset(keep)

    def begin(self, version: int, in_flight: Iterable[int]) -> tuple[AdapterVersion, dict[str, Any]]:
        """Begin the commit of a version: requests can no longer name what the commit drops.

        The version that serves now stays loaded: requests begin under it until the commit is known to have succeeded, and a
        rollback returns to it.

        Returns the version, and fields of its `UpdateRequest`. `in_flight` are the ids of adapters that requests compute with.
        """
        adapter, keep = self._announced.get(version, (None, frozenset()))
        made = AdapterVersion(next(self._ids), version)
        self._undo = self._named
        self._named = {number: each for number, each in self._named.items() if number in keep and number != version}
        fields = self._fields(made.id, in_flight)
        return made, fields if adapter is None else {**fields, "announced": adapter.model_dump()}

    def committed(self, made: AdapterVersion) -> None:
        """Let new requests compute with `made`."""
        self._before, self._serving = self._serving, made
        self._named[made.version] = made
        # Its own announcement stays: after a rollback the same version may be committed again.
        self._announced = {number: each for number, each in self._announced.items() if number >= made.version}

    def begin_rollback(self, version: int, in_flight: Iterable[int]) -> dict[str, Any]:
        """Begin the rollback of the newest version: requests can no longer name it. Returns fields of the `UpdateRequest`.

        Raises:
            CommitError: There is no version before, and this one was not announced: requests that name none need one.
        """
        if self._before is None and version not in self._announced:
            raise CommitError(
                f"version {version} cannot be rolled back: no adapter was committed before it.", part=self._part
            )
        self._undo = self._named
        self._named = {number: each for number, each in self._named.items() if number != version}
        return self._fields(0 if self._before is None else self._before.id, in_flight)

    def rolled_back(self) -> None:
        """Let new requests compute with the version before. Versions that the commit dropped do not come back."""
        self._before, self._serving = None, self._before
        if self._serving is not None:
            self._named[self._serving.version] = self._serving

    def untouched(self) -> None:
        """Restore what requests can name after an update that failed and changed nothing."""
        self._named = self._undo

    def _fields(self, serving: int, in_flight: Iterable[int]) -> dict[str, Any]:
        loaded = {*(used for used in in_flight if used), *(each.id for each in self._named.values())}
        if self._serving is not None:
            loaded.add(self._serving.id)
        return {"adapter": serving, "in_use": sorted(loaded)}
