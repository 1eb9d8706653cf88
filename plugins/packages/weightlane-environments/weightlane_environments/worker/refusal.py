"""The error of a call that cannot work, whatever the model replies."""

from __future__ import annotations


class RefusedError(Exception):
    """Raised for a task or an option that cannot work. The caller's process raises it again as a `ConfigError`."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
