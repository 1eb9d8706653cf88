"""The registry: engines of distributions on disk, resolved in a process that sees them installed."""

from __future__ import annotations

from typing import Any

import pytest
from installed import install
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError, UnknownEngineError
from weightlane.ckpt_engines.runtime.fork_server import ForkServer

GROUP = "weightlane.ckpt_engines"
GOOD_MODULE = """
from pydantic import Field
from weightlane.ckpt_engines import API_VERSION, Capabilities, CheckpointEngine, Delivery, EngineConfig

class AcmeConfig(EngineConfig):
    lanes: int = Field(2, ge=1, description="Parallel connections.")

class Good(CheckpointEngine):
    api_version = API_VERSION
    capabilities = Capabilities(devices=frozenset({"cpu"}), delivery=frozenset({Delivery.STORE}), persistent=True)
    config_type = AcmeConfig
    def make_sender(self, name, device): raise NotImplementedError
    def make_receiver(self, name, device): raise NotImplementedError

class OtherApi(Good):
    api_version = 999

class FirstApi(Good):
    api_version = 1
    def make_sender(self, name): raise NotImplementedError

class NoCapabilities(CheckpointEngine):
    api_version = API_VERSION
    def make_sender(self, name, device): raise NotImplementedError
    def make_receiver(self, name, device): raise NotImplementedError

class Half(CheckpointEngine):
    api_version = API_VERSION
    capabilities = Good.capabilities
    def make_sender(self, name, device): raise NotImplementedError

class Elsewhere(Good):
    @classmethod
    def unavailable_reason(cls):
        return "no warp drive"

class SaysFalse(Good):
    @classmethod
    def unavailable_reason(cls):
        return False

def not_a_class():
    pass
"""

ENTRY_POINTS = """
good = acme_engines:Good
other-api = acme_engines:OtherApi
first-api = acme_engines:FirstApi
no-capabilities = acme_engines:NoCapabilities
says-false = acme_engines:SaysFalse
Big name = acme_engines:Good
half = acme_engines:Half
elsewhere = acme_engines:Elsewhere
not-a-class = acme_engines:not_a_class
needs-rdma = acme_rdma:Engine [rdma]
twin = acme_engines:Good
"""

WRONG = {
    "text-of-devices": (
        'capabilities = Capabilities("cpu", frozenset({Delivery.STORE}))',
        ["devices is 'cpu'", 'Write devices=frozenset({"cpu"})'],
    ),
    "misspelt-delivery": (
        'capabilities = Capabilities(frozenset({"cpu"}), frozenset({"broadcst"}))',
        ["delivery is {'broadcst'}", "Delivery.BROADCAST, Delivery.POINT_TO_POINT, Delivery.STORE"],
    ),
    "flag-of-text": (
        'capabilities = Capabilities({"cpu"}, {Delivery.STORE}, persistent="no")',
        ["persistent is 'no'", "persistent=True, or leave it out"],
    ),
    "dict-of-capabilities": (
        'capabilities = {"devices": ["cpu"]}',
        ["acme_wrong_dict_of_capabilities.Wrong", "capabilities is {", "Write Capabilities(devices="],
    ),
    "text-of-version": ('api_version = "1"', ["api_version is '1'", "Write api_version = 2"]),
    "no-config-type": ("config_type = dict", ["config_type is <class 'dict'>", "derived from EngineConfig"]),
    "no-config": (
        "def __init__(self): pass",
        ["acme_wrong_no_config.Wrong", "__init__ does not take the config", "def __init__(self, config)"],
    ),
    "no-classmethod": ("def unavailable_reason(self): return None", ["asked of the class", "@classmethod"]),
}
"""Faulty engine classes by engine name, each in its own module: the one wrong line, and parts of the error message."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> dict[str, Any]:
    """The report of a registry in another process, where three more distributions with engines are installed."""
    site = tmp_path_factory.mktemp("site")
    wrong = {name: f"acme_wrong_{name.replace('-', '_')}" for name in WRONG}
    install(site, "acme_engines", GOOD_MODULE, ENTRY_POINTS, GROUP)
    install(site, "other_engines", "", "twin = acme_engines:Good", GROUP)
    install(site, "wrong_engines", "", "\n".join(f"{name} = {module}:Wrong" for name, module in wrong.items()), GROUP)
    for name, module in wrong.items():
        (site / f"{module}.py").write_text(
            f"from acme_engines import *\n\nclass Wrong(CheckpointEngine):\n    {WRONG[name][0]}\n"
        )
    (site / "acme_rdma.py").write_text("import nosuch_rdma_library\n")
    child = forks.fork("registry_probe:probe", str(site))
    answer = child.socket.receive(HANG_S)
    assert answer is not None, child.output()
    return dict(answer)


def test_listing_names_finds_every_distribution_and_imports_no_engine(found: dict[str, Any]) -> None:
    assert {"gloo", "nccl", "hccl", "shm", "filesystem", "good", "twin"} <= set(found["names"])
    assert found["names"] == sorted(found["names"])
    assert found["imported"] == []


def test_an_engine_of_another_distribution_is_made_from_its_own_options_with_faults_too(found: dict[str, Any]) -> None:
    assert (found["good"], found["faulty:good"]) == (None, None)
    assert ["good", "acme_engines 1.0", True, None] in found["rows"]
    assert not [name for name in found["names"] if name.startswith("faulty:")]


REFUSED = {
    "needs-rdma": ("EngineImportError", ["acme_engines 1.0", "acme_rdma", "nosuch_rdma_library", "acme_engines[rdma]"]),
    "twin": ("DuplicateEngineError", ["acme_engines 1.0", "other_engines 1.0"]),
    "other-api": ("EngineContractError", ["acme_engines 1.0", "999", "2"]),
    "no-capabilities": ("EngineContractError", ["acme_engines 1.0", "NoCapabilities must set capabilities ="]),
    "Big name": ("EngineContractError", ["acme_engines 1.0", "a lower-case letter, followed by lower-case letters"]),
    "first-api": ("EngineContractError", ["written for engine API 1", "Write an engine"]),
    "half": ("EngineContractError", ["make_receiver"]),
    "not-a-class": ("EngineContractError", ["acme_engines 1.0", "not_a_class"]),
    "elsewhere": ("EngineUnavailableError", ["no warp drive", "gloo"]),
    **{name: ("EngineContractError", ["wrong_engines 1.0", *said]) for name, (_, said) in WRONG.items()},
}
"""The error for each engine that cannot be used, and parts of its message."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_engine_that_cannot_be_had_fails_with_its_own_error_and_says_what_to_do(
    found: dict[str, Any], name: str
) -> None:
    error, said = REFUSED[name]
    assert found[name]["type"] == error
    text = f"{found[name]['message']} {found[name]['hint']}"
    assert [part for part in (name, *said) if part not in text] == []
    assert found[name]["hint"]
    with_faults = found[f"faulty:{name}"]
    assert (with_faults["type"], with_faults["hint"]) == (error, found[name]["hint"])
    assert name in with_faults["message"]


def test_the_list_has_a_row_with_the_reason_for_every_engine_that_cannot_be_used(found: dict[str, Any]) -> None:
    rows = {name: (distribution, loaded, reason) for name, distribution, loaded, reason in found["rows"]}
    assert sorted(rows) == found["names"]
    assert "nosuch_rdma_library" in rows["needs-rdma"][2]
    assert rows["twin"][0] == "acme_engines 1.0 and other_engines 1.0"
    assert rows["elsewhere"][1:] == (True, "no warp drive")
    assert rows["shm"][2] is None
    assert "SaysFalse returned False; it must return None where the engine can run" in rows["says-false"][2]
    for name, (_, said) in WRONG.items():
        assert [part for part in said if part not in rows[name][2]] == []


def test_an_unknown_name_lists_all_and_suggests_the_nearest() -> None:
    registry = CheckpointEngineRegistry()
    unknown = dict.fromkeys(("faulty:", "faulty:nosuch", "faulty:faulty:shm"), "called")
    for name, said in {"filesytem": "Did you mean 'filesystem'?", **unknown}.items():
        with pytest.raises(UnknownEngineError) as failure:
            registry.create(name)
        assert [part for part in (said, *registry.names()) if part not in str(failure.value)] == []


def test_options_are_checked_by_the_engines_own_config_and_every_bad_key_is_named() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("shm", {"socket_dirr": "/tmp"}, r"socket_dirr.*\bsocket_dir\b"),
        ("filesystem", {}, "path"),
        ("filesystem", {"path": "weights/of-mine"}, "path.*relative, and every process has a directory of its own"),
        ("filesystem", {"path": "file://weights"}, "path.*relative"),
        ("gloo", {"host": 5}, "host"),
        ("gloo", {"host": "0"}, "host.*wildcard"),
        ("faulty:filesystem", {"inner": {"path": "/x", "keep_versions": 0}}, "inner.keep_versions"),
        ("faulty:shm", {"inner": 3}, "inner"),
        ("faulty:shm", {"kinds": ["drop", "explode"]}, "kinds.1"),
    ]
    for engine, options, said in wrong:
        with pytest.raises(ConfigError, match=rf"(?s)checkpoint_engine\.options\.{said}"):
            CheckpointEngineRegistry().create(engine, options)
