"""Linux network namespaces, for benchmarks that connect sender and receivers by a link of their own."""

from __future__ import annotations

import ctypes
import os

from weightlane.ckpt_engines import ConfigError

_CLONE_NEWNET = 0x40000000
_PART = "benchmark network"


def new_network() -> int:
    """Move the calling thread into a new network namespace and return a descriptor of the namespace.

    The system removes the namespace with its last process and last descriptor, however the program ends. Raises `ConfigError`
    where the namespace may not be made.
    """
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter_network(path: str) -> None:
    """Move the calling thread, and threads that it starts later, into the namespace whose descriptor is at `path`.

    Existing sockets stay in their namespace. Raises `ConfigError` where the namespace may not be entered.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"there is no network namespace at {path}: {error.strerror}.", part=_PART) from None
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def _call(function: str, *arguments: int) -> None:
    """Call a function of the C library that Python's `os` has only from version 3.12 on."""
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), function)
    except AttributeError:
        raise ConfigError("this system has no network namespaces.", part=_PART) from None
    if call(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"{function} of a network namespace failed: {reason}.",
            part=_PART,
            hint="Run as root, or with the capability CAP_SYS_ADMIN.",
        )
