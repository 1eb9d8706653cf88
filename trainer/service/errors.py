"""Errors that only the service has."""

from __future__ import annotations

from weightlane.ckpt_engines import ConfigError, ProtocolError, WeightlaneError


class BusyError(WeightlaneError):
    """A queue is full: the client should try again later."""


class UnknownError(ConfigError):
    """A client asks for a session, model, sampler or checkpoint that it doesn't have."""


class TooLargeError(ProtocolError):
    """A request's body is larger than the service takes."""
