"""Names from peers, files and users never lead out of the directory they belong to, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sessions import receive, send, soon

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ConfigError,
    ProtocolError,
    StoringSender,
    Topology,
    VersionFiles,
    WeightlaneError,
)
from weightlane.ckpt_engines.engines.filesystem.file_names import parse_latest
from weightlane.ckpt_engines.links import ReceiverLink, SenderLink
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.rollout.layout.loading.checkpoint_expectation import expectation_of
from weightlane.trainer.engines.hf.model_dir import weight_headers

HOSTILE = ["../x", "..", "", "/etc/x", "a/b", "a\\b", "nul\0", "x" * 5000, "\ud800", "a b", "a\n", "~"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """The only directory where anything may appear."""
    (tmp_path / "outside").write_text("untouched")
    path = tmp_path / "inside" / "store"
    yield path
    assert {entry.name for entry in tmp_path.iterdir()} <= {"outside", "inside"}
    assert (tmp_path / "outside").read_text() == "untouched"
    assert {entry.name for entry in (tmp_path / "inside").glob("*")} <= {"store"}


def test_no_session_is_stored_under_a_name_that_leads_elsewhere(store: Path) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    addresses = {"sockets": {}, "engine": {}}
    for name in HOSTILE:
        for link in (SenderLink.of(engine, "s", HOST), ReceiverLink.of(engine, "r", HOST)):
            with pytest.raises(ProtocolError, match="not a session name"):
                link.connect(Topology(name, {"s": addresses}, {"r": addresses}), soon())
            link.close()
    assert not store.exists() or not list(store.iterdir())


def test_the_name_of_a_sender_is_never_part_of_a_path(store: Path) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    for number, name in enumerate(HOSTILE):
        sender, receiver = SenderLink.of(engine, name, HOST), ReceiverLink.of(engine, "r", HOST)
        topology = Topology(f"session-{number}", {name: sender.address()}, {"r": receiver.address()})
        sender.connect(topology, soon())
        receiver.connect(topology, soon())
        send(sender, Bucket(1, 0, torch.ones(3, dtype=torch.uint8)), ["r"])
        received = Bucket(1, 0, torch.zeros(3, dtype=torch.uint8))
        receive(receiver, received, name)
        assert received.data.all()
        assert {path.name for path in (store / f"session-{number}").iterdir()} == {"sender-0"}
        sender.close()
        receiver.close()


def test_a_document_of_a_version_stays_in_its_directory(store: Path) -> None:
    engine = CheckpointEngineRegistry().create("filesystem", {"path": str(store)})
    sender = engine.make_sender("s", HOST)
    assert isinstance(sender, StoringSender)
    sender.connect(Topology("session", {"s": sender.address()}, {}), {}, soon())
    for name in [*HOSTILE, ".hidden", "a/../b"]:
        with pytest.raises(ProtocolError):
            sender.open_version(VersionFiles(1, [b""], {name: "text"}), soon())
        with pytest.raises(ProtocolError, match="name of a document"):
            sender.commit_version(2, {name: "text"}, soon())
    sender.close()
    assert not list(store.iterdir())


def test_the_directory_of_the_newest_version_lies_in_the_store() -> None:
    good = {"version": 1, "directory": "run-1/sender-0/v1"}
    assert parse_latest(json.dumps({**good, "committed": [good]}), "latest.json", "p")[0].directory == good["directory"]
    for name in ("../../x", "/etc", "run-1/sender-0/../v1", "run-1/sender-0/v1/..", "run-1/sender-0/v1\n", "", "run-1"):
        with pytest.raises(ProtocolError):
            parse_latest(json.dumps({**good, "committed": [{**good, "directory": name}]}), "latest.json", "p")


def test_a_host_or_an_interface_that_is_none_is_refused() -> None:
    for option in ("host", "interface"):
        for name in ("nul\0", "x" * 300, "a..b", "\ud800", "nosuch interface"):
            with pytest.raises(WeightlaneError):
                SenderLink.of(CheckpointEngineRegistry().create("gloo", {option: name}), "s", HOST).address()


def test_the_index_of_a_checkpoint_names_files_of_its_own_directory_only(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for place in (tmp_path / "x", tmp_path / "model.safetensors"):  # what a path out of the directory would find
        save_file({"a": torch.zeros(1)}, place)
    for name in HOSTILE:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError):
            expectation_of(model, dtype=torch.float32, tied_embeddings=False)
        with pytest.raises(ConfigError):
            weight_headers(model)
