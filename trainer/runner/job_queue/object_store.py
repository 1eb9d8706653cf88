"""`ObjectStore`: objects in S3, or what speaks its API, with writes that only succeed over content that the writer knows.

fsspec has no such writes over known content, so this calls S3's own client below `s3fs`, with the options of `s3fs`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import sync as run_on_its_loop

from weightlane.ckpt_engines import ConfigError, Deadline, DeadlineExceededError, StorageError, WeightlaneError

_T = TypeVar("_T")
_PART = "job store"
_PROTOCOLS = ("s3", "s3a")
_CHANGED = 412
"""Status of a conditional write whose condition does not hold."""
_CONFLICT = 409
"""Status of a conditional write beside another one of the same object. Nothing was written, and it may be repeated."""
_MISSING = 404
_NOT_IMPLEMENTED = (400, 405, 501)
"""Statuses with which a server answers a condition that it does not know."""
_RETRY_S = 0.02


class ObjectStore:
    """Objects below an ``s3://`` URL. Keys are relative to it.

    Every method raises `StorageError` if the store refuses, or `DeadlineExceededError`. A write that has run into its deadline
    may still take effect later.

    Args:
        url: Bucket and prefix, as ``s3://bucket/jobs``.
        storage_options: Arguments of s3fs's ``S3FileSystem``.
        timeout_s: Limit in seconds for each call that is not given one.

    Raises:
        ConfigError: `url` is of another kind of store, or s3fs is not installed.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> None:
        protocol, _, path = url.partition("://")
        bucket, _, prefix = path.strip("/").partition("/")
        if protocol not in _PROTOCOLS or not bucket:
            raise ConfigError(
                f"jobs cannot be in {url!r}: a worker needs writes that fail if another one was faster, and they are there for"
                " s3://bucket/prefix alone.",
                part=_PART,
                hint="Use a directory, or a store with S3's API (storage_options: endpoint_url).",
            )
        try:
            options = {"use_listings_cache": False, **(storage_options or {})}
            self._fs = fsspec.filesystem(protocol, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{url!r} cannot be used: {error}.", part=_PART, hint="pip install 'weightlane[fs]' has S3."
            ) from error
        self.url = url.rstrip("/")
        self._bucket, self._prefix, self._timeout_s = bucket, f"{prefix}/" if prefix else "", timeout_s
        self._checked = False

    def read(self, key: str) -> bytes | None:
        """Content of an object; None if there is none."""
        found = self.read_tagged(key)
        return None if found is None else found[0]

    def read_tagged(self, key: str, timeout_s: float | None = None) -> tuple[bytes, str] | None:
        """Content and ETag of an object; None if there is none."""

        async def call() -> tuple[bytes, str] | None:
            try:
                answer = await self._call("get_object", Key=self._prefix + key)
            except OSError as error:
                if _status(error) == _MISSING:
                    return None
                raise
            async with answer["Body"] as body:
                return bytes(await body.read()), str(answer["ETag"])

        return self._run(call, f"read {key}", timeout_s)

    def write(self, key: str, data: bytes) -> None:
        """Write an object, over any other of that key."""
        self._run(lambda: self._call("put_object", Key=self._prefix + key, Body=data), f"write {key}")

    def swap(self, key: str, data: bytes, etag: str | None, timeout_s: float | None = None) -> str | None:
        """Write an object if its ETag is still `etag`, or, with None, if there is none. Returns the new ETag.

        Returns None if the condition does not hold. That may be because of this very write: the client repeats a request whose
        answer was lost. So `data` should be like no other, and the caller should read it then.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        deadline = Deadline.after(timeout_s or self._timeout_s)

        async def call() -> str | None:
            try:
                answer = await self._call("put_object", Key=self._prefix + key, Body=data, **condition)
            except OSError as error:
                if _status(error) in (_CHANGED, _CONFLICT) or (etag is not None and _status(error) == _MISSING):
                    return "" if _status(error) == _CONFLICT else None
                raise
            return str(answer["ETag"])

        while (found := self._run(call, f"write {key}", deadline.remaining_s)) == "":
            deadline.check(f"other writes of {self.url}/{key} to end", part=_PART)
            time.sleep(_RETRY_S)
        return found

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        self._run(lambda: self._call("delete_object", Key=self._prefix + key), f"delete {key}")

    def names(self, folder: str) -> list[str]:
        """The last parts of the keys in `folder`, in order."""
        prefix = f"{self._prefix}{folder}/"

        async def call() -> list[str]:
            found: list[str] = []
            more: dict[str, str] = {}
            while True:
                page = await self._call("list_objects_v2", Prefix=prefix, **more)
                found += [each["Key"].removeprefix(prefix) for each in page.get("Contents", ())]
                if not page.get("IsTruncated"):
                    return sorted(found)
                more = {"ContinuationToken": page["NextContinuationToken"]}

        return self._run(call, f"list {folder}")

    permanent_errors = False
    """Whether a write that has failed will fail again: a store may only have hiccups."""

    def lock(self) -> bool | None:
        """Lock the store until `unlock`, or the end of this process; False if another process has the lock.

        None: an object store has no lock, and the `Ledger` alone says who has the turn. Raises `ConfigError` if the store does
        not heed the conditions of writes, as stores before 2024 do not.
        """
        if not self._checked:
            self._check_conditions()
            self._checked = True
        return None

    def unlock(self) -> None:
        """Release the lock."""

    def _check_conditions(self) -> None:
        key = f"condition-{secrets.token_hex(8)}"
        try:
            first = self.swap(key, b"1", None)
            heeds_new = self.swap(key, b"2", None) is None
            heeds_known = self.swap(key, b"3", '"0"') is None and self.swap(key, b"4", first) not in (None, first)
            heeds = heeds_new and heeds_known and self.read(key) == b"4"
            told = "" if heeds else "it writes whatever the condition"
        except StorageError as error:
            if _status(error.__cause__) not in _NOT_IMPLEMENTED:
                raise
            told = str(error.__cause__)
        finally:
            with suppress(WeightlaneError):  # what has failed before says more
                self.delete(key)
        if told:
            raise ConfigError(
                f"{self.url} cannot hold jobs for workers: it has no conditional writes (If-None-Match, If-Match on PutObject):"
                f" {told}.",
                part=_PART,
                hint="Two workers could execute the same job. Use a store that has them (S3 does), a newer s3fs and botocore,"
                " or a directory.",
            )

    async def _call(self, method: str, **arguments: Any) -> Any:
        return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)

    def _run(self, call: Callable[[], Awaitable[_T]], action: str, timeout_s: float | None = None) -> _T:
        with _typed(f"{action} in {self.url}"):
            found: _T = run_on_its_loop(self._fs.loop, call, timeout=timeout_s or self._timeout_s)
            return found


def encode_json(facts: Mapping[str, Any]) -> bytes:
    """The bytes of a small document of a store."""
    return json.dumps(facts, sort_keys=True).encode()


def decode_json(data: bytes, where: str) -> dict[str, Any]:
    """Decode the bytes of `encode_json`. Raises `StorageError` for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StorageError(f"{where} is damaged.", part=_PART)
    return found


@contextmanager
def _typed(action: str) -> Iterator[None]:
    try:
        yield
    except WeightlaneError:
        raise
    except fsspec.FSTimeoutError as error:
        raise DeadlineExceededError(f"the store took too long to {action}.", part=_PART) from error
    except Exception as error:  # aiohttp and botocore have many types
        raise StorageError(
            f"cannot {action}: {type(error).__name__}: {error}.",
            part=_PART,
            hint="Check the store's endpoint, bucket and credentials (storage_options).",
        ) from error


def _status(error: BaseException | None) -> int:
    """The HTTP status behind an error of s3fs; 0 if there is none."""
    for each in (error, getattr(error, "__cause__", None)):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0
