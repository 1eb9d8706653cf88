"""Plain data from peers, files and users are parsed or refused by weightlane's own errors, soon and in little memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import MEMORY_LIMIT_BYTES, REGISTRY, mutated, mutated_bytes, peak_bytes, survives
from hypothesis import given
from waiting import HANG_S

from weightlane.ckpt_engines import ProtocolError, StagingMemoryError, WeightlaneError, error_from_wire
from weightlane.ckpt_engines.channels.channel import proves
from weightlane.ckpt_engines.channels.socket_factory import host_and_port, socket_name
from weightlane.ckpt_engines.engines.filesystem.file_names import parse_latest, parse_sender
from weightlane.rollout.commit.remote_failure import failure_from_text
from weightlane.rollout.layout.loading.checkpoint_expectation import expectation_of
from weightlane.sync import Manifest, RendezvousAddress
from weightlane.sync.control.messages import decode
from weightlane.sync.plan.session_plan import Supply
from weightlane.sync.receive.read_version import read_version
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.safetensors_files import MANIFEST_FILE, manifest_of_document

MANIFEST = {
    "version": 3,
    "codec": "dense",
    "base_version": None,
    "bucket_bytes": 128,
    "tensors": [["a", [2, 3], "float32"], ["b", [], "bfloat16"], ["c", [0, 5], "bool"]],
}
ERROR = {"type": "PeerLostError", "message": "gone", "part": "p", "peer": "q", "hint": "h"}
MESSAGES = [
    {"type": "connect", "session": "s", "publishers": ["t"], "needs": {"r/0": "key"}, "deadline_s": 1.0},
    {"type": "open", "session": "s", "version": 1, "manifest": MANIFEST, "deadline_s": 1.0, "stall_s": 1.0},
    {"type": "failed", "name": "n", "session": "s", "version": 1, "error": ERROR},
    {"type": "hello", "name": "n", "session": "s", "need": "key"},
]
PLACEMENT = [["a", [2, 3], "float32", [[[0, 0], [1, 3]]]], ["b", [], "bfloat16", [[[], []]]]]
LATEST = {"version": 2, "directory": "run-1/sender-0/v2"}


def parse_manifest(plain: Any) -> None:
    manifest = Manifest.from_plain(plain)
    assert manifest.total_bytes >= 0
    assert manifest.bucket_count >= 0
    assert manifest.window(0)
    assert Manifest.from_plain(manifest.to_plain()) == manifest
    assert manifest.layout_digest
    assert manifest.is_delta or manifest.offered(manifest.to_offer()) == manifest


def parse_placement(plain: Any) -> None:
    placement = Placement.from_plain(plain)
    assert placement.nbytes >= 0
    assert Placement.from_plain(placement.to_plain()) == placement


PLAIN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "manifest": (MANIFEST, parse_manifest),
    "placement": (PLACEMENT, parse_placement),
    "what trainer ranks send": ([[["trainer-0", PLACEMENT]], 1 << 20, True, "", "chain"], Supply.from_plain),
    "rendezvous address": ({"host": "h", "port": 5, "secret": "s"}, RendezvousAddress.from_plain),
    "error": (ERROR, error_from_wire),
    "error text": (ERROR, lambda plain: failure_from_text(f"weightlane-error:{json.dumps({'error': plain})}", part="p")),
    "proof": ("0" * 64, lambda plain: proves(b"key", plain, "label")),
    "TCP address": ({"host": "127.0.0.1", "port": 5}, lambda plain: host_and_port(plain, "part", "peer")),
    "socket name": ({"socket": "weightlane-0123456789abcdef.sock"}, lambda plain: socket_name(plain, "part", "peer")),
    "fault options": (
        {"inner": {"socket_dir": "/tmp"}, "seed": 1, "rate": 0.1, "kinds": ["drop"], "delay_s": 1, "log": "x"},
        lambda plain: REGISTRY.validate_options("faulty:shm", plain),
    ),
    "filesystem options": ({"path": "/x"}, lambda plain: REGISTRY.validate_options("filesystem", plain)),
    "newest versions": (
        {**LATEST, "committed": [LATEST, LATEST]},
        lambda plain: parse_latest(json.dumps(plain), "latest.json", "part"),
    ),
    "manifest's file": (
        {"layout_digest": Manifest.from_plain(MANIFEST).layout_digest, "manifest": MANIFEST},
        lambda plain: manifest_of_document(json.dumps(plain)),
    ),
    "sender's file": ({"process": {"pid": 1}, "oldest": 0}, lambda plain: parse_sender(json.dumps(plain))),
}  # fmt: skip
NOT_A_MAPPING = {"rendezvous address", "TCP address", "socket name", "fault options", "filesystem options"}
"""Parsers that are only given mappings: the connection's message type, or the configuration's, checks that first."""


@pytest.mark.property
@pytest.mark.parametrize("what", PLAIN)
def test_plain_data_is_parsed_or_refused(what: str) -> None:
    valid, parse = PLAIN[what]
    parse(valid)

    @given(mutated(valid))
    def fuzz(plain: Any) -> None:
        if what not in NOT_A_MAPPING or isinstance(plain, dict):
            survives(lambda: parse(plain))

    fuzz()


@pytest.mark.timeout(HANG_S)  # as many steps as the sizes say would take days
def test_sizes_that_lie_cost_neither_time_nor_memory() -> None:
    manifests = [
        {"tensors": [["a", [2**62, 2**62], "float64"]]},
        {"tensors": [["a", [10**4000] * 3, "float64"]]},
        {"tensors": [["a", [2**40], "int8"]], "bucket_bytes": 64},
        {"tensors": [["a", [1] * 20_000, "int8"]]},
        {"version": 2**63},
    ]
    placements = [
        [["a", [10**4000], "int8", []]],
        [["a", [2], "int8", [[[0], [10**4000]]]]],
        [["a", [float("inf")], "int8", []]],
        [["a", [2], "int8", [[["0"], [True]]]]],
        [["a", [2], "int8", [[[0], [1]]] * 5_000]],
    ]
    parsed = [
        *(partial(parse_manifest, {**MANIFEST, **changed}) for changed in manifests),
        *(partial(parse_placement, plain) for plain in placements),
    ]
    for parse in parsed:
        assert peak_bytes(partial(survives, parse)) < MEMORY_LIMIT_BYTES


def test_a_stored_version_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    manifest = Manifest.from_plain({**MANIFEST, "tensors": [["a", [2**60], "int8"]], "bucket_bytes": 2**60})
    directory = tmp_path / LATEST["directory"]  # type: ignore[operator]
    directory.mkdir(parents=True)
    (tmp_path / "latest.json").write_text(json.dumps({**LATEST, "committed": [LATEST]}))
    document = {"layout_digest": manifest.layout_digest, "manifest": manifest.to_plain()}
    (directory / MANIFEST_FILE).write_text(json.dumps(document))
    with pytest.raises(StagingMemoryError):
        read_version(str(tmp_path))


@pytest.mark.property
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message["type"]))
def test_control_messages_are_parsed_or_refused(message: dict[str, Any]) -> None:
    decode(json.dumps(message).encode())

    @given(mutated(message) | mutated_bytes(json.dumps(message).encode()))
    def fuzz(changed: Any) -> None:
        survives(lambda: decode(changed if isinstance(changed, bytes) else json.dumps(changed).encode()))

    fuzz()


def test_a_message_cannot_ask_for_a_wait_that_never_ends() -> None:
    for seconds in ("NaN", "Infinity", "-Infinity", "1e999"):
        with pytest.raises(ProtocolError):
            decode(json.dumps(MESSAGES[0]).replace("1.0", seconds).encode())


def test_data_nested_without_end_are_refused(tmp_path: Path) -> None:
    nested = "[" * 100_000
    with pytest.raises(ProtocolError):
        decode(b'{"type":"open","manifest":' + nested.encode())
    with pytest.raises(ProtocolError):
        parse_latest(nested, "latest.json", "part")
    assert parse_sender(nested) == ({}, 0)
    assert failure_from_text(f"weightlane-error:{nested}", part="p").intact is False
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":' + nested)
    with pytest.raises(WeightlaneError):
        expectation_of(tmp_path, dtype=torch.float32, tied_embeddings=False)
