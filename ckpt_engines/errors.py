"""The exception tree of weightlane.

Every error names the *part* that failed, the *peer* that it was talking to (if any), and in a *hint* what the reader can do. Each
class also derives from the standard-library exception that a caller would expect. Errors can be pickled, for Ray and
``multiprocessing``, and sent as JSON data (`WeightlaneError.to_wire`, `error_from_wire`), so that every participant of a failed
sync raises the same type.
"""

from __future__ import annotations

from typing import Any


class WeightlaneError(Exception):
    """Base class of every error weightlane raises on purpose.

    Args:
        message: What happened, as a full sentence without the part's name.
        part: The component that noticed the failure, e.g. ``"shm receiver"``.
        peer: The other side involved, e.g. ``"rollout-0/tp1"``; empty when there is none.
        hint: What the reader can do; empty only when nothing useful can be said.
    """

    def __init__(self, message: str, *, part: str = "weightlane", peer: str = "", hint: str = "") -> None:
        # A file name that is not UTF-8 has characters that no message and no log can carry.
        texts = (text.encode(errors="backslashreplace").decode() for text in (message, part, peer, hint))
        self.message, self.part, self.peer, self.hint = texts
        super().__init__(self.message)

    def __str__(self) -> str:
        peer = f" (peer {self.peer})" if self.peer else ""
        hint = f" {self.hint}" if self.hint else ""
        return f"{self.part}{peer}: {self.message}{hint}"

    def to_wire(self) -> dict[str, str]:
        """Return this error as data for a JSON message."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "part": self.part,
            "peer": self.peer,
            "hint": self.hint,
        }


class ConfigError(WeightlaneError, ValueError):
    """Raised when a configuration value is missing, unknown, of the wrong type or impossible here; nothing was started."""


class RegistryError(WeightlaneError, LookupError):
    """Base of the errors raised when the registry cannot make the engine of a given name; nothing was started."""


class UnknownEngineError(RegistryError):
    """Raised when no installed distribution registers an engine of that name; nothing was imported."""


class DuplicateEngineError(RegistryError):
    """Raised when two installed distributions register an engine of the same name; neither was imported."""


class EngineImportError(RegistryError, ImportError):
    """Raised when an engine's module cannot be imported; other engines can still be used."""


class EngineContractError(RegistryError, TypeError):
    """Raised when an engine's class breaks the contract: wrong API version, base class or declaration; no engine was made."""


class EngineUnavailableError(WeightlaneError, RuntimeError):
    """Raised when an engine is installed but cannot run on this machine; no engine was made."""


class TransportError(WeightlaneError, ConnectionError):
    """Raised when a transport fails for a reason other than a lost peer or a deadline.

    The connection is closed and a new one can be made.
    """


class PeerLostError(TransportError):
    """Raised when the other side closed its connection or died; the connection is closed and a new one can be made."""


class DeadlineExceededError(WeightlaneError, TimeoutError):
    """Raised when a blocking call reaches its deadline.

    The awaited event may still happen, and a connection that it belongs to is closed.
    """


class ClosedError(WeightlaneError, RuntimeError):
    """Raised by a call on a closed object, and by a running call when its object is closed; the object stays closed."""


class StorageError(WeightlaneError, OSError):
    """Raised when a file system or shared memory refuses a read or a write, for example because it is full.

    Nothing half-written is ever read.
    """


class AddressInUseError(WeightlaneError, OSError):
    """Raised when the port to listen on is taken; nothing listens."""


class ProtocolError(WeightlaneError, ValueError):
    """Raised when a peer sends something that is not a valid message, address or header.

    The invalid data is not used, and the connection is closed.
    """


class CorruptBucketError(ProtocolError):
    """Raised when a bucket's bytes do not match its checksum; its version is not used."""


class ManifestError(WeightlaneError, ValueError):
    """Raised when a manifest does not describe the tensors that the receiver expects; its version is not used."""


class StagingMemoryError(WeightlaneError, MemoryError):
    """Raised when staging a version would need more memory than the receiver may use; the version is not staged."""


class CommitError(WeightlaneError, RuntimeError):
    """Raised when a staged version cannot be put into service.

    The replica may hold parts of it, unless the error is an `UntouchedError`.
    """


class UntouchedError(CommitError):
    """Raised when a replica does not take a version and proves that its weights are unchanged; it continues to serve them."""


class QuorumError(WeightlaneError, RuntimeError):
    """Raised when fewer replicas take a version than the run requires; the version is aborted everywhere."""


class QuarantinedError(WeightlaneError, RuntimeError):
    """Raised when a replica cannot prove what weights it holds; it does not serve until a complete version is committed on it."""


class ReplicaTakenError(WeightlaneError, RuntimeError):
    """Raised when a replica already follows another publisher that is alive; it keeps following that one."""


class SupersededError(WeightlaneError, RuntimeError):
    """Raised when a version is given up because a newer one was published; nothing of it was sent."""


class WorkerDiedError(WeightlaneError, RuntimeError):
    """Raised when the process of a trainer rank, a replica or a helper has ended; the data in its memory is lost."""


class RewardError(WeightlaneError, ValueError):
    """Raised when the reward function raises, returns no finite number or takes too long; the completion is not trained on."""


class EpisodeError(WeightlaneError, RuntimeError):
    """Raised when an environment raises, or does what an environment must not do; its episode is not trained on."""


class GradientError(WeightlaneError, ArithmeticError):
    """Raised when the gradient of a step is not finite; no parameter was changed."""


class ForwardMemoryError(WeightlaneError, MemoryError):
    """Raised when a forward pass would need more memory than there is; nothing was computed."""


class TooManyFailuresError(WeightlaneError, RuntimeError):
    """Raised when more of the last samples or optimizer steps failed than the configuration allows; the run ends."""


class DeltaBaseError(WeightlaneError, LookupError):
    """Raised when a delta needs a base version that the receiver does not hold, or holds with different bits; nothing changed.

    The message says which version is held and which is needed. A full version replaces both.
    """


class SyncAbortedError(WeightlaneError, RuntimeError):
    """Raised on every side of a sync when its version is given up; the previous version continues to serve.

    Args:
        version: The version that was given up, or -1 when unknown.
        reason: The typed error of the participant that failed first, the same on every side.
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
        """Make the error for the sync of `version`, which failed for `reason`."""
        return cls(
            f"version {version} was aborted, the previous version keeps serving. Cause: {type(reason).__name__}: {reason}",
            version=version,
            reason=reason,
        )


def _subclasses(cls: type[WeightlaneError]) -> dict[str, type[WeightlaneError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_subclasses(child))
    return found


def error_from_wire(data: Any) -> WeightlaneError:
    """Make the error that `WeightlaneError.to_wire` turned into `data`.

    When this process does not know the type, or cannot construct it, the result is a plain `WeightlaneError` with the same text;
    that may happen with a third-party engine's own types. Malformed `data` gives a plain `WeightlaneError`, too.
    """
    fields = {name: text for name, text in data.items() if isinstance(text, str)} if isinstance(data, dict) else {}
    message = fields.get("message", "no message")
    facts = {"part": fields.get("part", "unknown part"), "peer": fields.get("peer", ""), "hint": fields.get("hint", "")}
    try:
        return _subclasses(WeightlaneError).get(fields.get("type", ""), WeightlaneError)(message, **facts)
    except Exception:  # noqa: BLE001 - a third party's constructor
        return WeightlaneError(message, **facts)


def as_weightlane_error(error: BaseException, part: str) -> WeightlaneError:
    """Return `error` if it is a `WeightlaneError`, else a `WeightlaneError` that names its type and has it as cause."""
    if isinstance(error, WeightlaneError):
        return error
    wrapped = WeightlaneError(f"unexpected {type(error).__name__}: {error}", part=part)
    wrapped.__cause__ = error
    return wrapped
