"""The one exception tree of weightlane.

Every failure names the *part* that failed, the *peer* it was talking to (if any) and a *hint*: what the reader can do about
it. Each class also derives from the standard-library exception a caller would expect, is picklable (Ray and
``multiprocessing`` carry it) and crosses a wire as plain data (`to_wire`, `error_from_wire`), so that every participant of a
failed sync raises the same type.
"""

from __future__ import annotations

from typing import Any


class WeightlaneError(Exception):
    """Base class of every error weightlane raises on purpose.

    Args:
        message: What happened, as a full sentence without the part's name.
        part: The component that noticed, e.g. ``"shm receiver"``.
        peer: The other side involved, e.g. ``"rollout-0/tp1"``; empty when there is none.
        hint: What the reader can do; empty only when nothing useful can be said.
    """

    def __init__(self, message: str, *, part: str = "weightlane", peer: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.part = part
        self.peer = peer
        self.hint = hint

    def __str__(self) -> str:
        peer = f" (peer {self.peer})" if self.peer else ""
        hint = f" {self.hint}" if self.hint else ""
        return f"{self.part}{peer}: {self.message}{hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.part, self.peer, self.hint)

    def to_wire(self) -> dict[str, str]:
        """This error as plain data for a JSON message."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "part": self.part,
            "peer": self.peer,
            "hint": self.hint,
        }


def _rebuild(cls: type[WeightlaneError], message: str, part: str, peer: str, hint: str) -> WeightlaneError:
    return cls(message, part=part, peer=peer, hint=hint)


class ConfigError(WeightlaneError, ValueError):
    """A configuration value is missing, unknown or ill-typed."""


class RegistryError(WeightlaneError, LookupError):
    """The engine registry could not resolve a name."""


class UnknownEngineError(RegistryError):
    """No installed distribution offers an engine of that name."""


class DuplicateEngineError(RegistryError):
    """Two installed distributions offer an engine of the same name."""


class EngineImportError(RegistryError, ImportError):
    """The engine's entry point exists but its module could not be imported."""


class EngineContractError(RegistryError, TypeError):
    """The engine's class breaks the contract: wrong API version, base class or capability declaration."""


class EngineUnavailableError(WeightlaneError, RuntimeError):
    """The engine is installed but cannot run on this machine."""


class TransportError(WeightlaneError, ConnectionError):
    """A transport failed in a way that is neither a lost peer nor a deadline."""


class PeerLostError(TransportError):
    """The other side closed its connection or died."""


class DeadlineExceededError(WeightlaneError, TimeoutError):
    """A blocking call reached its deadline."""


class ClosedError(WeightlaneError, RuntimeError):
    """The object was closed, by its owner or because a sync was aborted."""


class StorageError(WeightlaneError, OSError):
    """A file system refused a read or a write, for example because the disk is full."""


class AddressInUseError(WeightlaneError, OSError):
    """The port asked for is taken."""


class ProtocolError(WeightlaneError, ValueError):
    """A peer sent something that is not a valid message, address or header."""


class CorruptBucketError(ProtocolError):
    """A bucket's header or checksum does not match its bytes."""


class ManifestError(WeightlaneError, ValueError):
    """A manifest does not describe what the receiver expects."""


class StagingMemoryError(WeightlaneError, MemoryError):
    """Staging a version would need more memory than the receiver may use."""


class CommitError(WeightlaneError, RuntimeError):
    """A staged version could not be put into service."""


class UntouchedError(CommitError):
    """A replica has not taken a version, and says that the weights it had are in place everywhere and serve on."""


class QuorumError(WeightlaneError, RuntimeError):
    """Fewer replicas took a version than the run asks for."""


class QuarantinedError(WeightlaneError, RuntimeError):
    """A replica may not serve until a complete version has been committed on it."""


class SupersededError(WeightlaneError, RuntimeError):
    """A version was given up before it was sent, because a newer one was published."""


class WorkerDiedError(WeightlaneError, RuntimeError):
    """A trainer rank or a rollout replica is gone."""


class RewardError(WeightlaneError, ValueError):
    """The reward function gave no finite number for a completion: it raised, returned something else, or took too long."""


class GradientError(WeightlaneError, ArithmeticError):
    """The gradient of a step is not finite. No parameter was changed."""


class TooManyFailuresError(WeightlaneError, RuntimeError):
    """Of the last samples or optimizer steps of a run, more failed than its configuration allows."""


class DeltaBaseError(WeightlaneError, LookupError):
    """A delta needs a base version that this side does not hold, or holds with other bits.

    The message says which version is held and which is needed; a full version helps.
    """


class SyncAbortedError(WeightlaneError, RuntimeError):
    """A version was given up on; the previous one keeps serving.

    Raised on every side of a sync with the same `reason`, the typed error of whoever failed first.
    """

    def __init__(
        self,
        message: str,
        *,
        part: str = "sync",
        peer: str = "",
        hint: str = "",
        version: int = -1,
        reason: WeightlaneError | None = None,
    ) -> None:
        super().__init__(message, part=part, peer=peer, hint=hint)
        self.version = version
        self.reason = reason

    @classmethod
    def because(cls, version: int, reason: WeightlaneError) -> SyncAbortedError:
        """Wrap whatever failed first during the sync of `version`."""
        return cls(
            f"version {version} was aborted, the previous version keeps serving. Cause: {type(reason).__name__}: {reason}",
            version=version,
            reason=reason,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_abort, (self.message, self.part, self.peer, self.hint, self.version, self.reason)


def _rebuild_abort(
    message: str, part: str, peer: str, hint: str, version: int, reason: WeightlaneError | None
) -> SyncAbortedError:
    return SyncAbortedError(message, part=part, peer=peer, hint=hint, version=version, reason=reason)


def _subclasses(cls: type[WeightlaneError]) -> dict[str, type[WeightlaneError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_subclasses(child))
    return found


def error_from_wire(data: Any) -> WeightlaneError:
    """Rebuild an error that `WeightlaneError.to_wire` turned into plain data.

    A type this process does not know or cannot rebuild (a third-party engine's own) becomes a plain `WeightlaneError` that
    keeps the text; so does whatever else a peer sent in place of an error.
    """
    plain = data if isinstance(data, dict) else {}
    told = {field: text for field, text in plain.items() if isinstance(text, str)}
    message = told.get("message", "no message")
    facts = {"part": told.get("part", "unknown part"), "peer": told.get("peer", ""), "hint": told.get("hint", "")}
    try:
        return _subclasses(WeightlaneError).get(told.get("type", ""), WeightlaneError)(message, **facts)
    except Exception:  # noqa: BLE001 - a third party's constructor
        return WeightlaneError(message, **facts)


def as_weightlane_error(error: BaseException, part: str) -> WeightlaneError:
    """`error` itself when it is ours, else a `WeightlaneError` that names its type and keeps it as cause."""
    if isinstance(error, WeightlaneError):
        return error
    wrapped = WeightlaneError(f"unexpected {type(error).__name__}: {error}", part=part)
    wrapped.__cause__ = error
    return wrapped
