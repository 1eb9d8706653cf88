"""Nothing that weightlane reads can run code: no module of ours unpickles, and a pickle bomb at any of our doors stays one."""

from __future__ import annotations

import ast
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
from weightlane.ckpt_engines.channels.connection import Frame
from weightlane.sync import Rendezvous
from weightlane.sync.control.hub.frames import Kind
from weightlane.sync.control.messages import Stop

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli", "examples", "benchmarks")
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "multiprocessing",
    "torch.multiprocessing", "torch.package", "torch.distributed.checkpoint", "torch.distributed.rpc", "ray",
    "pebble",
}  # fmt: skip
"""Modules that unpickle, run or build objects out of what they read. `yaml` is here as a whole because nothing uses it."""
CALLS = {
    "eval", "exec", "compile", "read_pickle", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
WORDS = re.compile(
    r"\b("
    + "|".join({name.rpartition(".")[2] for name in MODULES} | CALLS)
    + r"|torch\.load|allow_pickle|trust_remote_code|VLLM_ALLOW_INSECURE_SERIALIZATION)\b"
)
"""One of them is in the text of each module that does something dangerous; only such modules are parsed."""
ALLOWED = {
    # A run resumes from its own directory, which is as trusted as the configuration that names it.
    ("trainer/engines/fsdp2/state.py", "torch.distributed.checkpoint"): "a run's own saved state",
    # Only names where tensors of a model's state dictionary are; nothing is read.
    ("examples/torchrun/train_and_publish.py", "torch.distributed.checkpoint"): "state dictionaries in memory",
    # Ray carries calls between processes that it started itself; see docs/security.md.
    ("trainer/dispatch/ray_ranks.py", "ray"): "Ray between its own processes",
    ("rollout/replicas/ray_actor.py", "ray"): "Ray between its own processes",
    ("cli/run/ray_cluster.py", "ray"): "Ray between its own processes",
    # Rewards in processes: completions go there and numbers come back; see docs/security.md.
    ("trainer/data/rewards.py", "multiprocessing"): "how its own processes are started",
    ("trainer/data/rewards.py", "pebble"): "a pool of its own processes",
    # Hooks into the module, so that the suite notices an engine that unpickles.
    ("ckpt_engines/conformance/processes/unpickling.py", "pickle"): "watches for unpickling",
    # What is measured there is what others do; none of it is installed.
    ("benchmarks/peers/halves.py", "multiprocessing"): "processes of a benchmark",
    ("benchmarks/peers/others.py", "ray"): "a peer that is measured",
    # ``parent_process()`` only: which process to outlive.
    ("rollout/vllm/watchdog.py", "multiprocessing"): "asks for the parent's process id",
}


def dangers(path: Path) -> set[str]:
    """Find the imports, calls and settings in a module that could unpickle or run what it reads."""
    found: set[str] = set()
    text = path.read_text()
    if not WORDS.search(text):
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {_listed(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {_listed(f"{node.module}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Call):
            found.add(_dangerous_call(node))
        elif isinstance(node, ast.Constant) and node.value == "VLLM_ALLOW_INSECURE_SERIALIZATION":
            found.add(str(node.value))
    return found - {""}


def _listed(imported: str) -> str:
    return max((name for name in MODULES if f"{imported}.".startswith(f"{name}.")), key=len, default="")


def _dangerous_call(node: ast.Call) -> str:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in CALLS and (not owner or name not in {"eval", "compile"}):
        return name
    if (owner, name) == ("torch", "load") and keywords.get("weights_only") != "True":
        return "torch.load"
    if name == "load" and keywords.get("allow_pickle", "False") != "False":
        return "allow_pickle"
    if name == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
        return _listed(str(node.args[0].value))
    return "trust_remote_code" if keywords.get("trust_remote_code", "False") != "False" else ""


def test_no_module_of_ours_unpickles_or_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(ROOT)), danger)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not {"tests", "build"} & set(path.relative_to(ROOT).parts)
        for danger in dangers(path)
    }
    assert sorted(found - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - found) == [], "no longer needed"


def test_the_search_finds_each_kind_of_danger(tmp_path: Path) -> None:
    cases = {
        "import pickle": "pickle",
        "from torch.distributed import checkpoint": "torch.distributed.checkpoint",
        "importlib.import_module('dill')": "dill",
        "torch.load(path)": "torch.load",
        "torch.load(path, weights_only=True)": "",
        "numpy.load(path, allow_pickle=True)": "allow_pickle",
        "group.all_gather_object(a, b)": "all_gather_object",
        "eval(text)": "eval",
        "model.eval()": "",
        "os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'": "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "AutoModel.from_pretrained(path, trust_remote_code=True)": "trust_remote_code",
    }
    for source, danger in cases.items():
        (tmp_path / "module.py").write_text(source)
        assert dangers(tmp_path / "module.py") == {danger} - {""}, source


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
    inbox, mailbox, member = rendezvous.inbox("a"), rendezvous.mailbox("s"), Rendezvous.join(address)
    for bomb in bombs(crater):
        with socket.create_connection((address.host, address.port)) as stranger:  # proves nothing: nobody listens
            stranger.sendall(bomb)
        careless = Rendezvous.join(address)  # a member, but what it says is not signed
        careless._client.send.__self__.socket.send(bomb)  # type: ignore[attr-defined]
        careless.close()
        member._client.tell(Frame(Kind.POST, 0, "a", bomb))
        with pytest.raises(ProtocolError):
            inbox.get(soon())
        member.post("a", Stop())
        assert inbox.get(soon()) == Stop()
        member._client.tell(Frame(Kind.PUT, 0, "s\nkey", bomb))
        member.post("a", Stop())
        assert inbox.get(soon()) == Stop()
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
