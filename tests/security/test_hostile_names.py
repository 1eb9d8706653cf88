"""Names from peers, files and users never lead out of the directory they belong to, whatever is in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sessions import receive, send, soon

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ConfigError,
    ProtocolError,
    StorageError,
    StoringSender,
    Topology,
    VersionFiles,
    WeightlaneError,
)
from weightlane.ckpt_engines.engines.faulty.fault_log import read_fault_log
from weightlane.ckpt_engines.engines.filesystem.file_names import parse_latest
from weightlane.ckpt_engines.links.receiver_link import make_receiver_link
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.rollout.layout.loading.expectation import expectation_of
from weightlane.trainer.engines.hf.model_dir import _check_weights

HOSTILE = [
    "../x",
    "..",
    ".",
    "",
    "/etc/x",
    "a/b",
    "a\\b",
    "nul\0",
    "x" * 5000,
    "\ud800",
    "A",
    "-",
    "a b",
    "a\n",
    "~",
    "%2e%2e",
]


def names(values: list[str]) -> Any:
    return pytest.mark.parametrize("name", values, ids=lambda name: ascii(name)[1:12])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """The only directory where anything may appear."""
    (tmp_path / "outside").write_text("untouched")
    path = tmp_path / "inside" / "store"
    yield path
    assert {entry.name for entry in tmp_path.iterdir()} <= {"outside", "inside"}
    assert (tmp_path / "outside").read_text() == "untouched"
    assert {entry.name for entry in (tmp_path / "inside").glob("*")} <= {"store"}


@names(HOSTILE)
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_session(store: Path, name: str, side: str) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    link = make_sender_link(engine, "s", HOST) if side == "sender" else make_receiver_link(engine, "r", HOST)
    addresses = {"meeting": {}, "engine": {}}
    with pytest.raises(ProtocolError, match="not a session name"):
        link.connect(Topology(name, {"s": addresses}, {"r": addresses}), soon())
    link.close()
    assert not store.exists() or not list(store.iterdir())


@names(HOSTILE)
def test_a_sender(store: Path, name: str) -> None:
    """It may have any name, for it is never part of a path."""
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    sender, receiver = make_sender_link(engine, name, HOST), make_receiver_link(engine, "r", HOST)
    topology = Topology("session", {name: sender.address()}, {"r": receiver.address()})
    sender.connect(topology, soon())
    receiver.connect(topology, soon())
    send(sender, Bucket(1, 0, torch.ones(3, dtype=torch.uint8)), ["r"])
    received = Bucket(1, 0, torch.zeros(3, dtype=torch.uint8))
    receive(receiver, received, name)
    assert received.data.all()
    assert {path.name for path in (store / "session").iterdir()} == {"sender-0"}
    sender.close()
    receiver.close()


@names([name for name in HOSTILE if name not in {"A", "-"}] + [".hidden", "a/../b", "x" * 300])
def test_a_document_of_a_version(store: Path, name: str) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    sender = engine.make_sender("s", HOST)
    assert isinstance(sender, StoringSender)
    sender.connect(Topology("session", {"s": sender.address()}, {}), {}, soon())
    with pytest.raises(ProtocolError):
        sender.open_version(VersionFiles(1, [b""], {name: "text"}), soon())
    with pytest.raises(ProtocolError, match="name of a document"):
        sender.commit_version(2, {name: "text"}, soon())
    sender.close()
    assert not list(store.iterdir())


@names(["../../x", "/etc", "run-1/sender-0/../v1", "run-1/sender-0/v1/..", "run-1/sender-0/v1\n", "", "run-1", "nul\0"])
def test_the_directory_of_the_newest_version(name: str) -> None:
    good = {"version": 1, "directory": "run-1/sender-0/v1"}
    assert parse_latest(json.dumps({**good, "committed": [good]}), "latest.json", "p")[0].directory == good["directory"]
    with pytest.raises(ProtocolError):
        parse_latest(json.dumps({**good, "committed": [{**good, "directory": name}]}), "latest.json", "p")


@pytest.mark.parametrize("option", ["path", "socket_dir", "log"])
@names(["nul\0", "\ud800\0", "x" * 5000, "nosuch://x", "/proc/nosuch/x"])
def test_a_path_of_the_configuration(option: str, name: str, socket_dir: Path) -> None:
    """It may lead anywhere, for the user says so; one that is none fails in our own words."""
    engine, options = {
        "path": ("filesystem", {"path": name}),
        "socket_dir": ("shm", {"socket_dir": name}),
        "log": ("faulty:shm", {"log": name, "rate": 1, "inner": {"socket_dir": str(socket_dir)}}),
    }[option]
    with pytest.raises((ConfigError, StorageError)):
        use(engine, options)


def use(engine: str, options: dict[str, Any]) -> None:
    sender = make_sender_link(CheckpointEngineRegistry().create(engine, options), "s", HOST)
    try:
        sender.connect(Topology("session", {"s": sender.address()}, {}), soon())
        send(sender, Bucket(1, 0, torch.ones(3, dtype=torch.uint8)), [])
    finally:
        sender.close()


@names(["nul\0", "x" * 5000])
def test_a_fault_log(name: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        read_fault_log(tmp_path / name)


@pytest.mark.parametrize("option", ["host", "interface"])
@names(["nul\0", "x" * 300, "a..b", "\ud800", "nosuch interface"])
def test_a_host_or_an_interface(option: str, name: str) -> None:
    with pytest.raises(WeightlaneError):
        make_sender_link(CheckpointEngineRegistry().create("gloo", {option: name}), "s", HOST).address()


@names([name for name in HOSTILE if name != "A"])
def test_a_file_of_a_checkpoints_index(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for place in (tmp_path / "x", tmp_path / "model.safetensors"):  # what a path out of the directory would find
        save_file({"a": torch.zeros(1)}, place)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError):
        expectation_of(model, dtype=torch.float32, tied_embeddings=False)
    with pytest.raises(ConfigError):
        _check_weights(model)


@pytest.mark.parametrize("header", [b'{"a":' * 100_000, b'{"a": {"data_offsets": [0, Infinity]}}', b"[]", b"\xff"])
def test_a_header_of_a_model_to_train(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ConfigError):
        _check_weights(tmp_path)
