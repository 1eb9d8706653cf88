"""JSON Lines files of a user: one object per line, and errors that name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

_PART = "data"


def json_lines(path: Path, *, holds: str, setting: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``"FILE, line N"`` and the object of each non-blank line of a file.

    For messages, `holds` is a noun for a line's content, such as ``"task"``, and `setting` the configuration key with the file.

    Raises `ConfigError` naming file and line for a line that is not a JSON object; and for a file that is missing, unreadable,
    not UTF-8, or has only blank lines.
    """
    found = False
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found = True
                    where = f"{path}, line {number}"
                    yield where, _object(line, where)
    except FileNotFoundError as cause:
        raise ConfigError(f"there is no {holds} file {path}.", part=_PART, hint=f"Check {setting}.") from cause
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{path} is not UTF-8 text: {cause}.", part=_PART) from cause
    except OSError as cause:
        raise ConfigError(f"{path} cannot be read: {cause.strerror}.", part=_PART) from cause
    if not found:
        raise ConfigError(f"{path} holds no {holds}.", part=_PART, hint="It needs one JSON object per line.")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line, parse_constant=_refuse)
        if "\\u" in line:  # the file is UTF-8, so only an escape can be half a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as cause:
        raise ConfigError(
            f"{where}: it holds half of a character, {cause.object[cause.start : cause.end]!r}.",
            part=_PART,
            hint="A surrogate without its other half is no text: correct the program that wrote the file.",
        ) from None
    except json.JSONDecodeError as cause:
        raise ConfigError(f"{where}: not valid JSON: {cause.msg} at column {cause.colno}.", part=_PART) from cause
    except (ValueError, RecursionError) as cause:  # a number of thousands of digits; brackets too deep
        raise ConfigError(f"{where}: JSON that cannot be read: {cause}.", part=_PART) from cause
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(data).__name__}.", part=_PART)
    return data
