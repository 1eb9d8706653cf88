"""Authentication: the client of a request, by the token that it sends."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from ..config import TOKEN_ENV, ServiceConfig

ANONYMOUS = "anonymous"
_PART = "service"
_FIELDS = 2


class Clients:
    """The clients that may use a service, by their tokens.

    Raises `ConfigError` if there is no token, or their file is malformed or unreadable.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._anonymous = config.allow_anonymous
        tokens = {"client": token} if (token := os.environ.get(TOKEN_ENV, "")) else {}
        if config.tokens_file is not None:
            tokens = _read(config.tokens_file)
        if not tokens and not self._anonymous:
            raise ConfigError(
                "the service has no token by which it would know its clients.",
                part=_PART,
                hint=f"Set {TOKEN_ENV} or service.tokens_file; to try things out on this machine, service.allow_anonymous.",
            )
        # Digests have one length, so that the comparison reveals nothing about the token's.
        self._digests = {name: sha256(token.encode()).digest() for name, token in tokens.items()}

    def of(self, headers: Mapping[str, str]) -> str | None:
        """The name of the client that sent these headers; None if the token is unknown. Takes the same time for all tokens."""
        sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        digest, found = sha256(sent.encode()).digest(), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found or (ANONYMOUS if self._anonymous else None)


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"service.tokens_file {path} cannot be read: {cause}.", part=_PART) from cause
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != _FIELDS or fields[0] in tokens:
            raise ConfigError(
                f"line {number} of {path} is not a new name, a blank and a token.",
                part=_PART,
                hint="Such as: alice tml-...",
            )
        tokens[fields[0]] = fields[1]
    return tokens
