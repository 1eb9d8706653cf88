"""Names that clients choose. They become names of files, so few characters are allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from weightlane.ckpt_engines import ProtocolError

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$"
"""Pattern of a name: letters, digits, points, underscores and hyphens. It does not begin with a point, which excludes ``..``."""
IDENTIFIER = r"^[A-Za-z0-9_-][A-Za-z0-9._:-]{0,199}$"
"""Pattern of an identifier. The SDK itself calls a model ``SESSION:train:NUMBER``, so it may have colons, too."""
SCHEME = "tinker://"

Kind = Literal["weights", "sampler_weights", "external_weights"]
"""A full training state, weights to sample from, or weights to download."""


def checked_identifier(text: str, *, part: str) -> str:
    """`text`, an identifier; `ProtocolError` if it is none."""
    if re.fullmatch(IDENTIFIER, text) is None:
        raise ProtocolError(
            f"{text[:80]!r} is no identifier.", part=part, hint="Use those that the service gave as answers."
        )
    return text


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """The address of a checkpoint: ``tinker://MODEL/weights/NAME``, or with another `Kind`."""

    model: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; `ProtocolError` if `text` is none."""
        parts = text.removeprefix(SCHEME).split("/")
        kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
        whole = text.startswith(SCHEME) and len(parts) == 3 and parts[1] in kinds  # noqa: PLR2004  (as written above)
        if not whole or re.fullmatch(IDENTIFIER, parts[0]) is None or re.fullmatch(NAME, parts[2]) is None:
            raise ProtocolError(
                f"{text[:80]!r} is no path of a checkpoint.",
                part="checkpoint path",
                hint=f"It looks like {SCHEME}MODEL/weights/NAME, or has another of {', '.join(kinds)}.",
            )
        return cls(parts[0], kinds[parts[1]], parts[2])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"
