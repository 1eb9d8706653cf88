"""Which network a thread sees: Linux's network namespaces, for a benchmark whose two sides are joined by a link of its own."""

from __future__ import annotations

import ctypes
import os

from weightlane.ckpt_engines import ConfigError

_CLONE_NEWNET = 0x40000000
_PART = "benchmark network"


def new_network() -> int:
    """Put the calling thread into a network namespace of its own, and return a descriptor of that.

    The system removes the namespace with the last process in it and the last descriptor of it: nothing is left behind, however
    a program ends. `ConfigError` where it may not be made.
    """
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def enter_network(path: str) -> None:
    """Put the calling thread, and those it starts later, into the namespace whose descriptor is at `path`.

    Sockets that exist stay where they are. `ConfigError` where it may not be entered.
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
    """One that Python's os has from version 3.12 on."""
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), function)
    except AttributeError:
        raise ConfigError("this system has no network namespaces.", part=_PART) from None
    if call(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"{function} of a network namespace failed: {reason}.",
            part=_PART,
            hint="It takes root, or the capability CAP_SYS_ADMIN.",
        )
