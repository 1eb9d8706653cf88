"""`RolloutEngineConformance` combines every check of the suite in one class."""

from __future__ import annotations

from .checks.commits import CommitChecks
from .checks.decoding import DecodingChecks
from .checks.ends import EndChecks
from .checks.failures import FailureChecks
from .checks.requests import RequestChecks


class RolloutEngineConformance(
    DecodingChecks,
    RequestChecks,
    CommitChecks,
    FailureChecks,
    EndChecks,
):
    """The suite. Derive a test class and set `engine`, and `settings` and `models` if the engine takes others."""
