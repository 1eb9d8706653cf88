"""``weightlane conformance``: what it prints, what it writes, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from command_line import assert_refused, run

from weightlane.ckpt_engines.conformance import ConformanceReport, run_conformance
from weightlane.ckpt_engines.conformance.processes.pool import Pool

BROKEN = Path(__file__).parents[1] / "ckpt_engines" / "conformance" / "broken_engines.py"
ROLLOUT = "weightlane.rollout.engines.transformers.engine:TransformersEngine"
ADDRESS = "test_an_address_is_plain_data"
ONE_CHECK = ["--check", ADDRESS]


@pytest.fixture(scope="module")
def suite() -> Iterator[Callable[..., ConformanceReport]]:
    """Runs the suite for checkpoint engines in processes that the tests of this file share."""
    pool = Pool()
    yield partial(run_conformance, pool=pool)
    pool.close()


@pytest.fixture(autouse=True)
def shared_processes(suite: Callable[..., ConformanceReport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.cli.engines.conformance.run_conformance", suite)


def test_checks_that_pass_end_with_0_and_a_line_each_and_are_not_taken_for_all(tmp_path: Path) -> None:
    store = ["--set", f"path={tmp_path}"]
    waiting = ["--check", "test_sending_to_somebody_unknown_is_refused"]
    result = run("conformance", "filesystem", *store, *ONE_CHECK, *waiting, "--out", str(tmp_path / "junit.xml"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (passed,) = (line for line in lines if line.startswith("passed "))
    assert passed.endswith("s  an address is plain data")
    (skipped,) = (line for line in lines if line.startswith("skipped "))
    assert skipped.endswith("sending to somebody unknown is refused  the sender of a store does not wait for receivers")
    verdict = (
        "filesystem passes the requested checks; run all checks to see whether it conforms: 1 passed, 1 skipped in "
    )
    assert lines[-1].startswith(verdict)
    (suite,) = ET.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("2", "1", "0")


def test_a_class_at_a_place_is_tested_as_the_kind_of_engine_that_it_is() -> None:
    check = "test_undeclared_settings_are_refused_before_the_start"
    for place, message in ((ROLLOUT, ""), (f"{ROLLOUT}Nothing", "could not be loaded from")):
        result = run("conformance", place, "--check", check)
        assert (result.exit_code, message in result.stderr) == (2 if message else 0, True), result.output
        assert message or "undeclared settings are refused before the start" in result.stdout


def test_an_engine_that_does_not_conform_ends_with_1_and_says_why() -> None:
    engine = f"{BROKEN}:AddressIsNoPlainData"
    result = run("conformance", engine, *ONE_CHECK, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["counts"] == {"passed": 0, "failed": 1, "skipped": 0, "expected failure": 0}
    assert report["capabilities"]["delivery"] == ["broadcast", "point-to-point"]
    (check,) = report["checks"]
    assert (check["name"], check["outcome"]) == (ADDRESS, "failed")
    assert "expected an address of plain JSON data, it is" in check["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smh"], "no checkpoint engine is called 'smh'. Did you mean 'shm'?"),
        (["hccl"], "hccl cannot run here: torch_npu is not installed"),
        (["shm", "--set", "socket_dir"], "'socket_dir' does not have the form key=value or a.b=value"),
        (["shm", "--check", "test_nothing"], "there is no check called test_nothing"),
        (["--training", "template", "--check", "test_nothing"], "there is no check called test_nothing"),
        (["nowhere.py:Engine"], "could not be loaded from nowhere.py: FileNotFoundError"),
        (["fsdp2", "--set", "rank=2"], "these are no settings for trainer ranks: rank: Extra"),
        (["transformers", "--set", "tensor_parallel=2"], "transformers does not do what is set: tensor_parallel = 2"),
        (["--rollout", "fsdp2"], "no rollout engine is called 'fsdp2'"),
        (["--rollout", "--training", "template"], "--training and --rollout are two kinds of engines"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert_refused(message, "conformance", *arguments)
