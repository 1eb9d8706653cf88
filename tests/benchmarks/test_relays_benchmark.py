"""The benchmark of relays: both ways carry every bit, cards send what the routes say, and nothing stays behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from weightlane.ckpt_engines import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def relays(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("relays")


@pytest.mark.usefixtures("limited_links")
def test_both_ways_carry_every_bit_and_a_chain_s_trainer_sends_once(
    relays: ModuleType, networks_held: Callable[[], list[str]]
) -> None:
    threads = threading.active_count()
    with ThreadPoolExecutor(1) as aside:  # it changes the network of the thread that runs it
        report = aside.submit(
            relays.run,
            relays.named_workload("tiny"),
            receivers=3,
            rate_mbit=40.0,
            bucket_mib=1 / 128,
            rounds=1,
            integrity="full",
            timeout_s=30.0,
            say=lambda _: None,
        ).result(60)
    assert report["verified"]
    assert all(30 < rate < 44 for raw in report["raw_mbit"] for rate in raw.values())
    star, chain = report["rows"]["star"], report["rows"]["relays"]
    assert (star["routes"], star["depth"]) == (["star"], 1)
    assert (chain["routes"], chain["depth"]) == (["chain"], 3)
    assert star["predicted_s"] > 2 * chain["predicted_s"]
    payload = report["payload_bytes"]
    assert payload < chain["card_sent_bytes"][0] < 1.5 * payload < star["card_sent_bytes"][0]
    assert "times sooner" in relays.text(report)
    assert not networks_held()
    assert threading.active_count() <= threads


def test_the_plan_of_each_way_is_the_one_that_its_configuration_makes(relays: ModuleType) -> None:
    workload = relays.workload_named(relays.MATRICES)
    facts = relays.ways("127.0.0.1", rate_mbit=400.0, bucket_mib=4.0, integrity="off", timeout_s=1.0)
    network = facts[1].config.network
    star, chain = (relays.planned(workload, 4, each.config, network) for each in facts)
    assert star["bound_s"] == pytest.approx(4 * workload.nbytes / 50e6)
    assert chain["bound_s"] == pytest.approx(workload.nbytes / 50e6)
    assert chain["bound_s"] < chain["predicted_s"] < 1.2 * chain["bound_s"]


def test_the_committed_figures_make_a_table(relays: ModuleType) -> None:
    (newest,) = sorted((ROOT / "benchmarks/baselines").glob("*/relays-*.json"))[-1:]
    assert "carried after" in relays.text(json.loads(newest.read_text()))


def test_without_the_programs_it_ends_with_the_reason(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match=r"install iproute2|Linux"), networks.limited_hosts(2, 1.0):
        pass
