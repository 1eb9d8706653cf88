"""`LiveIdentity`: tracks which publication a rollout rank's live weights hold, and keeps the delta prepared for them."""

from __future__ import annotations

from typing import Any

from ..version.manifest import Manifest


class LiveIdentity:
    """The identity of the live weights, because a delta may only be applied to its base."""

    def __init__(self) -> None:
        self.identity = ""
        """Identity of the publication in the live weights; empty while that is not certain."""
        self._identity_before = ""
        self._staged = (-1, "")
        """Number and identity of the version staged last."""
        self._delta: tuple[int, Any] | None = None
        """Version of the staged delta, and the result of `Subscriber.prepare_delta` for it."""

    def stage(self, manifest: Manifest) -> None:
        """Note that a version was staged."""
        self._staged = manifest.version, manifest.identity

    def stage_delta(self, version: int, delta: Any) -> None:
        """Keep the prepared delta to `version`."""
        self._delta = version, delta

    def delta(self, version: int) -> Any | None:
        """The prepared delta to `version`, if there is one."""
        return self._delta[1] if self._delta is not None and self._delta[0] == version else None

    def forget_delta(self, version: int | None = None) -> None:
        """Free the prepared delta if it is the one to `version`; by default free any."""
        if self._delta is not None and version in (None, self._delta[0]):
            self._delta = None

    def take(self) -> None:
        """Note that a version is being written into the weights."""
        self.identity, self._identity_before = "", self.identity

    def restore(self) -> None:
        """Note that the weights are the same as before the last `take`."""
        self.identity = self._identity_before

    def commit(self, version: int) -> None:
        """Note that `version` serves."""
        staged, identity = self._staged
        self.identity, self._identity_before = (identity if staged == version else ""), ""
        self.forget_delta(version)
