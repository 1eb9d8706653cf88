"""The configuration: whatever is wrong with it is named by its path, and what it resolves to can be read back."""

from __future__ import annotations

import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from weightlane.ckpt_engines import ConfigError, EngineUnavailableError, UnknownEngineError, WeightlaneError
from weightlane.cli.config.run_config import RunConfig, load_config
from weightlane.cli.config.sft_config import load_sft_config
from weightlane.cli.config.tinker_config import load_tinker_config
from weightlane.cli.config.validation import explain
from weightlane.cli.config.worker_config import load_worker_config
from weightlane.rollout.contract.registry import rollout_engine_class
from weightlane.trainer.algorithms.composition import role_trainer
from weightlane.trainer.algorithms.roles import REFERENCE

MINIMAL = """
[run]
dir = "runs/new"
[model]
path = "model"
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
[reward]
function = "reward:exact_match"
"""
IN_TURNS = ("trainer.colocate=true", "loop.max_staleness=0", "rollout.commit=in_place", "sync.quorum=1.0")


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("override", "error", "said"),
    [
        ("checkpoint_engine.backend=glo", UnknownEngineError, ["'glo'", "Did you mean 'gloo'?", "filesystem, gloo"]),
        (
            "checkpoint_engine.backend=hccl",
            EngineUnavailableError,
            ["hccl cannot run here: torch_npu is not installed", "filesystem, gloo,", "shm"],
        ),
        ("checkpoint_engine.options.slot_mb=1", ConfigError, ["checkpoint_engine.options.slot_mb", "Options of shm"]),
        (
            "trainer.rank=2",
            ConfigError,
            ["there is no key trainer.rank.", "Did you mean trainer.ranks?", "[trainer] has the keys"],
        ),
        ("trainr.ranks=2", ConfigError, ["there is no key trainr.", "Did you mean trainer?"]),
        ("trainer.ranks=two", ConfigError, ["trainer.ranks", "integer", "'two'"]),
        ("trainer.betas=[0.9,1.5]", ConfigError, ["trainer", "betas must lie in [0, 1)"]),
        ("run=3", ConfigError, ["run must be a section with the keys dir, seed (got 3)"]),
        ("rollout.concurrency=4", ConfigError, ["rollout.concurrency (4)", "algorithm.group_size (8)"]),
        ("algorithm.temperature=5", ConfigError, ["algorithm.temperature", "less than or equal to 2"]),
        ("trainer.ranks", ConfigError, ["--set 'trainer.ranks'", "a.b=value"]),
        ("loop.step=3 rollout.dtype=int8", ConfigError, ["there is no key loop.step.", "rollout.dtype"]),
        (
            "rollout.commit=in_place sync.quantise=fp8",
            ConfigError,
            ["in_place cannot restore weights that are sent as fp8", "sync.quantise"],
        ),
        ("rollout.commit=in_place sync.relay=tree", ConfigError, ["in_place has no memory", "(sync.relay = tree)"]),
        *(
            (
                f"{' '.join(IN_TURNS)} {wrong}",
                ConfigError,
                [f"{key} is {value}, and with trainer.colocate it has to be"],
            )
            for wrong in (
                "loop.max_staleness=1",
                "rollout.commit=staged",
                "sync.codec=auto",
                "sync.quorum=0.5",
                "checkpoint_engine.backend=gloo",
                "rollout.gpus_per_rank=1.0",
            )
            for key, value in [wrong.split("=")]
        ),
        ("rollout.sleeps=true", ConfigError, ["there is no key rollout.sleeps."]),
        ("trainer.router_replay=true", ConfigError, ["there is no key trainer.router_replay."]),
        ("sync.relay=chain", ConfigError, ["sync.relay is chain, and receivers of shm cannot relay."]),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(
    minimal: Path, override: str, error: type[WeightlaneError], said: list[str]
) -> None:
    with pytest.raises(error) as caught:
        load_config(minimal, override.split(" "))
    for part in said:
        assert part in str(caught.value)


def test_rollouts_of_a_run_in_turns_sleep_and_one_whose_engine_cannot_is_refused(minimal: Path) -> None:
    config = load_config(minimal, IN_TURNS)
    assert config.rollout.sleeps
    assert "sleeps" not in tomllib.loads(explain(config))["rollout"]
    rollout_engine_class(config.rollout)
    with pytest.raises(ConfigError, match=r"trainer\.colocate, for which replicas sleep"):
        rollout_engine_class(config.rollout.model_copy(update={"engine": "sglang"}))
    for command, load, section in (
        ("sft", load_sft_config, '[sft]\n[data]\ntrain = "x"'),
        ("tinker", load_tinker_config, ""),
        ("worker", load_worker_config, "[worker]"),
    ):
        path = minimal.with_name(f"{command}.toml")
        run = "" if command == "worker" else '[run]\ndir = "r"\n'
        path.write_text(f'{run}[model]\npath = "m"\n{section}\n[trainer]\ncolocate = true\n')
        with pytest.raises(
            ConfigError, match=f"trainer.colocate is for the loop of weightlane train, and weightlane {command}"
        ):
            load(path)


def test_router_replay_asks_trainer_and_rollouts_and_an_engine_that_returns_no_experts_is_refused(
    minimal: Path,
) -> None:
    config = load_config(minimal, ["algorithm.router_replay=true"])
    assert (config.trainer.router_replay, config.rollout.routed_experts) == (True, True)
    assert not role_trainer(REFERENCE, config.trainer, config.critic).router_replay
    rollout_engine_class(config.rollout)
    with pytest.raises(ConfigError, match=r"algorithm\.router_replay, for which vllm and transformers return"):
        rollout_engine_class(config.rollout.model_copy(update={"engine": "sglang"}))


def test_a_missing_section_or_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL.replace('heldout = "heldout.jsonl"', "").replace("[model]\npath", "[run.model]\npath"))
    with pytest.raises(ConfigError, match=r"model is missing\.(?s:.*)data\.heldout is missing\.") as caught:
        load_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[run]\ndir = 'a\n", "is not valid TOML: Expected .*end of document"),
        (b"\xff\xfe", "cannot be read"),
        (None, "there is no configuration file"),
    ],
)
def test_a_file_that_is_no_toml_is_named_with_the_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_overrides_take_toml_values_and_bare_words(minimal: Path) -> None:
    overrides = ["trainer.betas=[0.8, 0.95]", "loop.steps=7", "run.dir=a b", 'ray.address="auto"']
    config = load_config(minimal, [*overrides, "rollout.enforce_eager=false"])
    assert (config.trainer.betas, config.loop.steps, config.run.dir) == ((0.8, 0.95), 7, Path("a b"))
    assert (config.rollout.enforce_eager, config.ray.address) == (False, "auto")


def test_an_engine_that_needs_a_directory_gets_one_in_the_run_directory_unless_it_is_given_one(minimal: Path) -> None:
    chosen = load_config(minimal, ["checkpoint_engine.backend=filesystem"])
    assert chosen.checkpoint_engine.options == {"path": str(Path("runs/new/versions").resolve())}
    given_one = load_config(
        minimal, ["checkpoint_engine.backend=filesystem", "checkpoint_engine.options.path=/somewhere"]
    )
    assert given_one.checkpoint_engine.options == {"path": "/somewhere"}
    assert load_config(minimal).checkpoint_engine.options == {}


def read_back(config: RunConfig, path: Path) -> RunConfig:
    path.write_text(explain(config))
    return load_config(path)


def test_the_printed_configuration_has_the_meaning_and_default_of_every_key_above_it(minimal: Path) -> None:
    keys = 0
    for above, line in pairwise(explain(load_config(minimal)).splitlines()):
        if re.match(r"(# )?\w+ (= |is not set)", line):
            keys += 1
            assert re.fullmatch(r"# .+ \((required|default: .*)\)", above), line
    assert keys > 100


def test_the_printed_configuration_reads_back_the_same(minimal: Path, tmp_path: Path) -> None:
    for overrides in (
        [],
        ["trainer.lora.publish=adapter"],  # which fills in the replicas' adapter
        [
            "checkpoint_engine.backend=filesystem",
            "rollout.kv_cache_memory_bytes=1048576",
            "rollout.extra_engine_args.nested={a = [1, 2], b = true}",
            "trainer.learning_rate=1e-9",
            "trainer.megatron.tensor_parallel=2",
        ],
    ):
        config = load_config(minimal, overrides)
        assert read_back(config, tmp_path / "again.toml") == config


class Section(BaseModel):
    """Values that TOML writes in other ways than JSON."""

    text: str = Field(description="Any string.")
    rate: float = Field(description="Any number.")
    nested: dict[str, list[str | float]] = Field(description="Both in a table.")


class Configuration(BaseModel):
    section: Section


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=20),
    rate=st.floats(allow_nan=False),
)
def test_any_string_and_number_reads_back_the_same(text: str, rate: float) -> None:
    section = Section(text=text, rate=rate, nested={text: [text, rate]})
    assert tomllib.loads(explain(Configuration(section=section))) == {"section": section.model_dump()}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sync.quantise=fp8", "sync.quantise = fp8 is for versions of weights"),
        ("rollout.commit=in_place", "rollout.commit = in_place is for versions of weights"),
        ("rollout.adapter.rank=3", "there is no key rollout.adapter. Did you mean rollout.adapter_slots?"),
    ],
)
def test_what_versions_of_an_adapter_cannot_be_is_refused_and_rollouts_get_the_trainers_adapter(
    minimal: Path, override: str, said: str
) -> None:
    adapter = ["trainer.lora.rank=8", "trainer.lora.targets=['q_proj']", "trainer.lora.publish=adapter"]
    config = load_config(minimal, adapter)
    assert config.rollout.adapter is not None
    assert config.rollout.adapter.model_dump() == {"rank": 8, "alpha": 32.0, "targets": ("q_proj",)}
    assert load_config(minimal, adapter[:-1]).rollout.adapter is None
    with pytest.raises(ConfigError, match=said):
        load_config(minimal, [*adapter, override])
