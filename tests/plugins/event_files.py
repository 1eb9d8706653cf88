"""Reads TensorBoard's event files: TFRecord framing (length, masked CRC-32C, data, masked CRC-32C) around protobuf."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

POLYNOMIAL = 0x82F63B78


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli), bit by bit, masked as TFRecord does."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked_crc(data[at : at + 8])
        payload = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked_crc(payload)
        yield payload
        at += 16 + length


def scalars_and_texts(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Curves by tag and step, and texts by tag, of the only event file."""
    (path,) = directory.glob("events.out.tfevents.*")
    curves: dict[str, dict[int, float]] = {}
    texts: dict[str, str] = {}
    for record in records(path):
        event: Any = Event.FromString(record)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
            else:
                texts[value.tag] = value.tensor.string_val[0].decode()
    return curves, texts
