"""Calls of the control hub in threads, and the values that it keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weightlane.ckpt_engines import (
    WeightlaneError,
)
from weightlane.sync import Rendezvous


def raised_by(call: Callable[[], Any]) -> tuple[threading.Thread, list[WeightlaneError]]:
    """Run `call` on a thread of its own; what it raises."""
    errors: list[WeightlaneError] = []

    def run() -> None:
        try:
            call()
        except WeightlaneError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def value_counts(rendezvous: Rendezvous) -> dict[str, int]:
    """How many values the hub keeps in each scope."""
    scopes = list(rendezvous._hub.mailboxes._scopes.items())
    return {name: len(scope.values) for name, scope in scopes if scope.values}
