"""Reads TensorBoard's event files: TFRecord framing (length, checksum, data, checksum) around protobuf."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event


def scalars_and_texts(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Curves by tag and step, and texts by tag, of the only event file."""
    (path,) = directory.glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    curves: dict[str, dict[int, float]] = {}
    texts: dict[str, str] = {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event: Any = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
            else:
                texts[value.tag] = value.tensor.string_val[0].decode()
    assert at == len(data), "the file ends with a whole record"
    return curves, texts
