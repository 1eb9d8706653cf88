"""``weightlane plan`` and ``plan-shape``: what they show of a plan, and what they say of one that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import assert_refused, report, run
from tiny_run import Material


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where layouts are kept: not with the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WEIGHTLANE_LAYOUT_CACHE", raising=False)
    return tmp_path / "cache" / "weightlane" / "layouts"


def test_a_plan_is_reported_in_bytes_links_and_words() -> None:
    layouts = ["30b", "--trainer", "pp2 ep4", "--rollout", "2x tp2", "--receiver-gbps", "16"]
    found = report("plan-shape", *layouts, "--links", "3", "--relay", "chain")
    assert found["shape"] == "Qwen3-30B-A3B"
    assert (found["trainer_ranks"], found["rollout_ranks"], len(found["replicas"])) == (8, 4, 2)
    assert found["crossing_bytes"] == found["minimum_bytes"] == sum(found["replicas"].values())
    links = [link["bytes"] for link in found["links"]]
    assert len(links) == 3
    assert links == sorted(links, reverse=True)
    assert found["busiest_receiver"]["bytes"] >= found["minimum_bytes"] / 4
    assert found["busiest_receiver"]["seconds"] == pytest.approx(found["busiest_receiver"]["bytes"] / 2e9)
    assert found["busiest_sender"]["seconds"] is None
    assert found["relayed_lanes"] == found["lanes"]
    broadcast = report("plan-shape", *layouts[:5], "--engine", "nccl")
    assert broadcast["busiest_sender"]["bytes"] < broadcast["payload_bytes"] / 8 * 1.1
    result = run("plan-shape", *layouts)
    assert result.exit_code == 0, result.stderr
    assert "8 trainer ranks to 4 rollout ranks in 2 replica" in result.stdout
    assert "relays" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan-shape", "7b"], "'7b' is no shape that is known. Known: 30b, 235b, 1t. The plan of a run"),
        (["plan", "nowhere.toml"], "there is no configuration file nowhere.toml"),
        (["plan-shape", "30b", "--trainer", "pp2 zz4"], "'zz4' is no part of a layout. Write it like pp8 ep32"),
        (["plan-shape", "30b", "--engine", "shm"], "shm does not send lanes to rollout ranks. Leave out --engine"),
        (["plan-shape", "30b", "--trainer", "ep7"], "128 experts are not shared by 7 ranks. Change ep of --trainer."),
        (["plan-shape", "30b", "--trainer", "pp49"], "48 layers are not shared by 49 stages. Lower pp of --trainer."),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert_refused(message, *arguments)


@pytest.mark.usefixtures("forked_answers")
@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_is_planned_from_its_configuration(material: Material, tmp_path: Path, cache: Path) -> None:
    """Two FSDP2 ranks to two replicas of two ranks, over an engine that cannot run here: of that only the facts count."""
    config = material.write_config(tmp_path, tmp_path / "run", rollout={"tensor_parallel": 2, "replicas": 2})
    overrides = ["trainer.ranks=2", "checkpoint_engine.backend=nccl", "sync.codec=delta"]
    found = report("plan", str(config), *(part for each in overrides for part in ("--set", each)), "--sender-gbps", "1")
    assert (found["engine"], found["trainer"], found["wire"]) == ("nccl", "fsdp2", "float32")
    assert (found["trainer_ranks"], found["rollout_ranks"], len(found["replicas"])) == (2, 4, 2)
    assert found["cut"] == "exact"
    payload = found["payload_bytes"]
    assert found["crossing_bytes"] == found["minimum_bytes"] == sum(found["replicas"].values())
    # Norms and, with one key and value head for two ranks, keys and values are needed by both; most is by one.
    assert payload < found["crossing_bytes"] / 2 < 1.2 * payload
    assert found["busiest_sender"]["seconds"] == pytest.approx(found["busiest_sender"]["bytes"] / 125e6)
    codec, broadcast = found["notes"]
    assert "sync.codec = delta" in codec
    assert "broadcast lane" in broadcast
    assert len(list(cache.iterdir())) == 1
    assert not (tmp_path / "run").exists()
    in_a_store = ["--set", "checkpoint_engine.backend=filesystem", "--set", "trainer.ranks=2"]
    stored = report("plan", str(config), *in_a_store, "--links", "9")
    assert stored["gathered_by"] == "trainer-0", "several ranks cannot make one file"
    links = {(link["from"], link["to"]) for link in stored["links"]}
    assert {("trainer-1", "trainer-0"), ("trainer-0", "the store")} <= links
    assert len([end for start, end in links if start == "the store"]) == 4
