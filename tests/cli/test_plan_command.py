"""``weightlane plan``: what it shows of a plan, and what it says of one that cannot be made."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from typer.testing import CliRunner, Result

from weightlane.cli import main as command


def run(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(command.app, ["plan", *arguments], env={"COLUMNS": "160"})


def report(arguments: Sequence[str]) -> dict:
    result = run([*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_plan_is_explained_in_bytes_links_and_seconds() -> None:
    found = report(["30b", "--trainer", "pp2 ep4", "--rollout", "2x tp2", "--links", "3"])
    assert found["shape"] == "Qwen3-30B-A3B"
    assert (found["trainer_ranks"], found["rollout_ranks"], len(found["replicas"])) == (8, 4, 2)
    assert found["crossing_bytes"] == found["minimum_bytes"] == sum(found["replicas"].values())
    links = [link["bytes"] for link in found["links"]]
    assert len(links) == 3
    assert links == sorted(links, reverse=True)
    assert found["busiest_receiver"]["bytes"] >= found["minimum_bytes"] / 4
    predicted = found["predicted"]
    assert predicted["bound_s"] <= predicted["direct_s"] < predicted["one_stream_per_replica_s"]
    result = run(["30b", "--trainer", "pp2 ep4", "--rollout", "2x tp2"])
    assert result.exit_code == 0, result.stderr
    for said in (
        "8 trainer ranks to 4 rollout ranks in 2 replicas",
        found["digest"],
        "gathered, one stream per replica",
    ):
        assert said in result.stdout


def test_speeds_are_gigabytes_of_all_cards_or_gigabits_of_either_side() -> None:
    layouts = ["30b", "--trainer", "ep2", "--rollout", "1x tp2"]
    slow = report([*layouts, "--gb-per-s", "5"])["predicted"]
    fast = report([*layouts, "--sender-gbps", "400", "--receiver-gbps", "400"])["predicted"]
    assert slow["bound_s"] == pytest.approx(10 * fast["bound_s"])
    received = report([*layouts, "--sender-gbps", "4000", "--receiver-gbps", "40"])["predicted"]
    assert received["bound_by"].endswith("receiving")
    assert received["bound_s"] == pytest.approx(slow["bound_s"], rel=0.1)


def test_whole_shares_cross_more_than_is_needed_and_relays_are_asked_for() -> None:
    layouts = ["30b", "--trainer", "ep2", "--rollout", "4x tp2"]
    assert report(layouts)["routes"].keys() == {"star"}
    assert "chain" in report([*layouts, "--relay"])["routes"]
    shares = report([*layouts, "--cut", "shares"])
    assert shares["lanes"] == 2
    assert shares["crossing_bytes"] > shares["minimum_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["7b"], "'7b' is no shape that is known. Known: 30b, 235b, 1t."),
        (["run.toml"], "'run.toml' is no shape that is known."),
        (["30b", "--trainer", "pp2 zz4"], "'zz4' is no part of a layout. Write it like pp8 ep32"),
        (["30b", "--trainer", "ep7"], "128 experts are not shared by 7 ranks. Change ep of --trainer."),
        (["30b", "--rollout", "tp4 ep2"], "ep is 1 or the same as tp"),
        (["30b", "--wire", "int4"], "'int4' is no type on the wire. Known: bf16, fp8."),
        (["30b", "--cut", "thin"], "'thin' is no way to cut. --cut is exact or shares."),
        (["30b", "--gb-per-s", "0"], "must be more than nothing"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
