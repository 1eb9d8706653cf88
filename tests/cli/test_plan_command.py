"""``weightlane plan``: what it shows of a plan, and what it says of one that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import assert_refused, report, run
from tiny_run import Material

EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic/arithmetic.toml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where layouts are kept: not with the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WEIGHTLANE_LAYOUT_CACHE", raising=False)
    return tmp_path / "cache" / "weightlane" / "layouts"


def test_a_plan_is_explained_in_bytes_links_and_seconds() -> None:
    found = report("plan", "30b", "--trainer", "pp2 ep4", "--rollout", "2x tp2", "--links", "3")
    assert found["shape"] == "Qwen3-30B-A3B"
    assert (found["trainer_ranks"], found["rollout_ranks"], len(found["replicas"])) == (8, 4, 2)
    assert found["crossing_bytes"] == found["minimum_bytes"] == sum(found["replicas"].values())
    assert found["routes"].keys() == {"star"}
    links = [link["bytes"] for link in found["links"]]
    assert len(links) == 3
    assert links == sorted(links, reverse=True)
    assert found["busiest_receiver"]["bytes"] >= found["minimum_bytes"] / 4
    predicted = found["predicted"]
    assert predicted["bound_s"] <= predicted["direct_s"] < predicted["one_stream_per_replica_s"]


def test_a_plan_is_shown_in_words() -> None:
    result = run("plan", "30b", "--trainer", "ep2", "--rollout", "1x tp2")
    assert result.exit_code == 0, result.stderr
    for said in ("2 trainer ranks to 2 rollout ranks in 1 replica", "gathered, one stream per replica"):
        assert said in result.stdout


def test_speeds_are_gigabytes_of_all_cards_or_gigabits_of_either_side() -> None:
    layouts = ["30b", "--trainer", "ep2", "--rollout", "1x tp2"]
    slow = report("plan", *layouts, "--gb-per-s", "5")["predicted"]
    received = report("plan", *layouts, "--sender-gbps", "4000", "--receiver-gbps", "40")["predicted"]
    assert received["bound_by"].endswith("receiving")
    assert received["bound_s"] == pytest.approx(slow["bound_s"], rel=0.1)


def test_whole_shares_cross_more_than_is_needed_and_relays_are_asked_for() -> None:
    shares = report("plan", "30b", "--trainer", "ep2", "--rollout", "4x tp2", "--cut", "shares", "--relay")
    assert shares["lanes"] == 2
    assert shares["crossing_bytes"] > shares["minimum_bytes"]
    assert "chain" in shares["routes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7b"], "'7b' is no shape that is known. Known: 30b, 235b, 1t."),
        (["nowhere.toml"], "there is no configuration file nowhere.toml"),
        ([str(EXAMPLE), "--trainer", "pp2"], "arithmetic.toml' is the configuration of a run. Use --set."),
        (["30b", "--set", "trainer.ranks=2"], "--set is for the configuration of a run, and '30b' is not a file."),
        (["30b", "--trainer", "pp2 zz4"], "'zz4' is no part of a layout. Write it like pp8 ep32"),
        (["30b", "--trainer", "ep7"], "128 experts are not shared by 7 ranks. Change ep of --trainer."),
        (["30b", "--rollout", "tp4 ep2"], "ep is 1 or the same as tp"),
        (["30b", "--wire", "int4"], "'int4' is no type on the wire. Known: bf16, fp8."),
        (["30b", "--cut", "thin"], "there is no cut 'thin'. Set --cut to exact or shares."),
        (["30b", "--gb-per-s", "0"], "must be positive"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert_refused(message, "plan", *arguments)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.rank=2", "there is no key trainer.rank. Did you mean trainer.ranks?"),
        ("model.path=nowhere", "there is no model directory nowhere."),
        ("trainer.engine=fsdp3", "no training engine is called 'fsdp3'. Did you mean 'fsdp2'?"),
        (
            "trainer.fsdp2.tensor_parallel=2",
            "trainer.ranks is 1, which trainer.fsdp2.tensor_parallel = 2 does not divide.",
        ),
    ],
)
def test_a_bad_configuration_is_refused_as_by_a_run(
    override: str, message: str, material: Material, tmp_path: Path
) -> None:
    config = material.write_config(tmp_path, tmp_path / "run")
    result = run("plan", str(config), "--set", override)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


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
    assert found["network"]["bucket_bytes"] == 1 << 17
    assert found["network"]["sender_bytes_per_s"] == 125e6
    (note,) = found["notes"]
    assert "sync.codec = delta" in note
    assert len(list(cache.iterdir())) == 1
    assert not (tmp_path / "run").exists()
    fewer = report(
        "plan", str(config), *(part for each in (*overrides, "sync.quantise=fp8") for part in ("--set", each))
    )
    assert fewer["crossing_bytes"] == fewer["minimum_bytes"] < found["crossing_bytes"]
    assert fewer["payload_bytes"] < fewer["crossing_bytes"] / 2 < 1.2 * fewer["payload_bytes"], "slices, quantised too"


@pytest.mark.usefixtures("forked_answers")
def test_what_an_engine_cannot_do_is_not_planned(material: Material, tmp_path: Path) -> None:
    config = str(material.write_config(tmp_path, tmp_path / "run", rollout={"replicas": 2, "commit": "in_place"}))
    stored = report(
        "plan", config, "--set", "checkpoint_engine.backend=filesystem", "--set", "trainer.ranks=2", "--gb-per-s", "1"
    )
    assert stored["gathered_by"] == "trainer-0"
    payload, predicted = stored["payload_bytes"], stored["predicted"]
    assert predicted["write_s"] == pytest.approx(payload / 1e9)
    assert predicted["gather_s"] == pytest.approx(payload / 2e9, rel=0.05)
    assert predicted["stored_s"] > max(predicted["write_s"], predicted["read_s"])
    assert {(link["from"], link["to"]) for link in stored["links"]} == {
        ("trainer-1", "trainer-0"),
        ("trainer-0", "the store"),
        ("the store", "rollout-0/0"),
        ("the store", "rollout-1/0"),
    }
    result = run("plan", config, "--relay")
    assert result.exit_code == 0, result.stderr
    for said in ("sent by shm", "1 trainer ranks to 2 rollout ranks", "do not relay", "rollout.commit is in_place"):
        assert said in result.stdout
