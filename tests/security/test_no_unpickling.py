"""Nothing that weightlane reads can run code: no setting of ours has others unpickle, and no listener opens a pickle."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import Session, frame, soon
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, ProtocolError
from weightlane.ckpt_engines.channels.channel import Frame
from weightlane.sync import Rendezvous
from weightlane.sync.control.messages import Kind, Stop

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli", "examples", "benchmarks")
SETTINGS = re.compile(
    r"allow_pickle|trust_remote_code=True|VLLM_ALLOW_INSECURE_SERIALIZATION"
    r"|import_module\(.(?:pickle|dill|cloudpickle|joblib|marshal|shelve|yaml)"
)
"""Settings of libraries with which they unpickle or run what they read, and imports of modules that ruff does not see."""


def test_no_module_of_ours_has_a_library_unpickle_or_run_what_it_reads() -> None:
    """Ruff finds modules and functions that do so themselves; `pyproject.toml` bans them, and has the few exceptions."""
    found = {
        f"{path.relative_to(ROOT)}: {found[0]}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not {"tests", "build"} & set(path.relative_to(ROOT).parts)
        for found in SETTINGS.finditer(path.read_text())
    }
    assert found == set()


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self._crater = str(crater)

    def __reduce__(self) -> Any:
        return os.makedirs, (self._crater, 0o700, True)


@pytest.fixture
def crater(tmp_path: Path) -> Iterator[Path]:
    """Where the bombs of a test would strike; the test fails if one did."""
    yield tmp_path / "crater"
    assert not (tmp_path / "crater").exists(), "a bomb went off"


def bombs(crater: Path) -> list[bytes]:
    """The same bomb in every wrapping that some library would open."""
    plain = [pickle.dumps(Bomb(crater), protocol) for protocol in (0, 2, 5)]
    archive = io.BytesIO()
    torch.save(Bomb(crater), archive)
    return [
        *plain,
        archive.getvalue(),
        base64.b64encode(plain[2]),
        json.dumps({"py/reduce": plain[0].decode()}).encode(),
    ]


def test_the_bombs_would_go_off(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    for bomb in bombs(crater)[:3]:
        pickle.loads(bomb)
        shutil.rmtree(crater)
    torch.load(io.BytesIO(bombs(crater)[3]), weights_only=False)
    assert crater.exists()


def test_inboxes_and_mailboxes_open_no_pickle(crater: Path) -> None:
    rendezvous = Rendezvous.host()
    address = rendezvous.address
    mailbox, member = rendezvous.mailbox("s"), Rendezvous.join(address)
    rendezvous.listen("a")
    for bomb in bombs(crater):
        with socket.create_connection((address.host, address.port)) as stranger:  # proves nothing: nobody listens
            stranger.sendall(bomb)
        careless = Rendezvous.join(address)  # a member, but what it says is not signed
        careless._send.__self__.socket.send(bomb)  # type: ignore[attr-defined]
        careless.close()
        member.tell(Frame(Kind.POST, 0, "a", bomb))
        with pytest.raises(ProtocolError):
            rendezvous.receive(soon())
        member.post("a", Stop())
        assert rendezvous.receive(soon()) == Stop()
        member.tell(Frame(Kind.PUT, 0, "s\nkey", bomb))
        member.post("a", Stop())
        assert rendezvous.receive(soon()) == Stop()
        if bomb.startswith(b"{"):
            assert set(mailbox.get("key", soon())) == {"py/reduce"}
        else:
            with pytest.raises(ProtocolError):
                mailbox.get("key", soon())


@pytest.mark.parametrize("engine_name", ["gloo", "shm"])
def test_senders_open_no_pickle_from_strangers_and_serve_their_receivers_afterwards(
    engine_name: str, crater: Path, socket_dir: Path
) -> None:
    engine = CheckpointEngineRegistry().create(
        engine_name, {} if engine_name == "gloo" else {"socket_dir": str(socket_dir)}
    )
    session = Session(engine, "r", connect=False)
    connecting = session.threads.submit(session.sender.connect, session.topology, soon())
    for bomb in bombs(crater):
        for sent in (bomb + b"\0" * 70_000, frame(bomb)):
            answer = knock(session.topology.senders["s"]["sockets"], sent, socket_dir)
            assert b"proof" not in answer
    session.receivers["r"].connect(session.topology, soon())
    connecting.result(HANG_S)
    assert session.deliver(1, torch.ones(5, dtype=torch.uint8)).tolist() == [1] * 5
    session.close()


def knock(address: Any, sent: bytes, socket_dir: Path) -> bytes:
    """Send something to a sender's control socket and hear what it says before it hangs up."""
    is_tcp = "port" in address
    with socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX) as sock:
        sock.settimeout(HANG_S)
        sock.connect((address["host"], address["port"]) if is_tcp else str(socket_dir / address["socket"]))
        try:
            sock.sendall(sent)
            return b"".join(iter(lambda: sock.recv(65536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""
