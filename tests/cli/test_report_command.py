"""``weightlane report``: figures and time line against arithmetic on paper, hostile texts, a run that goes on."""

from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_refused, run
from waiting import HANG_S

from weightlane.cli.report.live_report import PageServer
from weightlane.cli.report.run_record import read_live, read_record
from weightlane.trainer.service.records.futures import Futures
from weightlane.trainer.service.records.store import DATABASE, Store

HOSTILE = "</script><script>document.title='owned'</script><b onmouseover=alert(1)>&amp;"
BEGAN = 1_800_000_000.0


def event(name: str, at: float, **facts: Any) -> str:
    return json.dumps({"time": BEGAN + at, "event": name, **facts}) + "\n"


def commit(version: int, at: float) -> str:
    replicas = {"rollout-0": {"outcome": "committed"}}
    facts = {
        "latency_s": 0.5,
        "export_s": 0.0625,
        "rollout_blocked_s": 0.125,
        "sent_bytes": 2_000_000,
        "failures": [],
        "replicas": replicas,
    }
    return event("version_committed", at, version=version, **facts)


def step(number: int, at: float, **facts: Any) -> str:
    usual = {"seconds": 1.5, "waited_for_rollouts_s": 0.5, "reward": number / 4, "tokens_per_s": 100.0}
    return event("training_step", at, step=number, **usual, **facts)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of four steps, each two seconds long, whose third version was aborted."""
    directory = tmp_path / "a run"
    directory.mkdir()
    synced = {"trainer_blocked_s": 0.25, "rollout_blocked_s": 0.125}
    lines = [
        commit(0, 0),
        event("evaluated", 0, step=0, accuracy=0.25, tasks=4),
        event("run_started", 0, step=0, steps=4),
        step(1, 2),
        commit(1, 2.5),
        step(2, 4, **synced),
        event("version_aborted", 4.5, version=2, error=f"no peer {HOSTILE}", seconds=0.5, failures=[{}]),
        event("replica_lost", 4.75, replica="rollout-1", error=HOSTILE, left=1, needed=1, successor=""),
        step(3, 6, loss=float("inf")),
        commit(3, 6.5),
        step(4, 8, **synced, synchronous_update_s=1.0, overlap_share=0.5),
        event("evaluated", 8, step=4, accuracy=0.75, tasks=4),
    ]
    (directory / "metrics.jsonl").write_text("".join(lines) + '{"event": "training_st')
    (directory / "samples.jsonl").write_text(
        json.dumps({"step": 4, "prompt": HOSTILE, "reward": 1.0, "versions": [[3, 9]]})
    )
    return directory


def test_figures_stalls_and_time_line_are_those_that_one_reckons_from_the_events(run_dir: Path) -> None:
    record = read_record(run_dir)
    figures = {each["name"]: each["value"] for each in record["figures"]}
    assert figures == {
        "optimizer steps": 4,
        "held-out accuracy, first": 0.25,
        "held-out accuracy, last": 0.75,
        "reward of the last step": 1.0,
        "tokens a second": 100.0,
        "versions committed": 3,
        "versions aborted": 1,
        "trainer idle": 2.0 / 8.0,
        "trainer blocked by syncs": 0.5 / 8.0,
        "rollouts blocked by syncs": 0.25 / 7.5,
        "both busy at once": 0.5,
    }
    assert (record["status"], record["drawn"]) == ("not ended at step 4 of 4", [])
    assert record["stalls"] == {"trainer": 0.5 / 4, "rollouts": 0.25 / 4, "blocking": 1.0}
    assert [each["reward"] for each in record["steps"]] == [0.25, 0.5, 0.75, 1.0]
    spans = {
        (each["lane"], each["kind"], each["version"]): (each["start"] - BEGAN, each["end"] - BEGAN)
        for each in record["time_line"]
    }
    assert len(spans) == len(record["time_line"]) == 4 * 2 + 3 * 3
    assert spans["trainer", "trains", 2] == (2.5, 4.0)
    assert spans["trainer", "waits for samples", 2] == (2.0, 2.5)
    assert spans["sync", "syncs", 1] == (2.0, 2.5)
    assert spans["generation", "serves odd versions", 1] == (2.5, 6.375)
    assert spans["generation", "blocked by the commit", 3] == (6.375, 6.5)
    assert spans["generation", "serves odd versions", 3] == (6.5, 8.0)
    assert {(each["export_s"], each["install_s"]) for each in record["syncs"][:2]} == {(0.0625, None)}, "older: none"
    assert [(each["version"], each["outcome"], each["retries"]) for each in record["syncs"]] == [
        (0, "committed", 0),
        (1, "committed", 0),
        (2, "aborted", 1),
        (3, "committed", 0),
    ]
    assert [each["version"] for each in record["aborted"]] == [2]
    assert (record["events"][0]["replica"], record["events"][0]["event"]) == ("rollout-1", "lost")


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (event("run_ended", 9, accuracy_after=0.75, samples={"drawn_tokens": 8.0, "trained_tokens": 6.0}), "ended"),
        (event("run_ended", 9, error="the disk is full"), "failed: the disk is full"),
        (event("run_ended", 9) + event("run_started", 10, step=2, steps=6) + step(3, 12), "not ended at step 3 of 6"),
    ],
)
def test_whether_a_run_has_ended_is_that_of_its_last_start(run_dir: Path, last: str, status: str) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\n" + last)
    bias = {"subject": "length of completions", "sentence": "6.0 tokens trained, 8.0 drawn: bias -25.0%"}
    record = read_record(run_dir)
    assert (record["status"], record["drawn"]) == (status, [bias] if status == "ended" else [])


def test_the_page_holds_the_whole_record_and_texts_of_others_remain_texts(run_dir: Path) -> None:
    done = run("report", str(run_dir))
    assert (done.exit_code, done.stdout) == (0, f"the report is {run_dir / 'report.html'}\n")
    page = (run_dir / "report.html").read_text()
    assert "owned" in page
    assert HOSTILE not in page
    assert len(re.findall("</script>", page)) == 3, "that of the record, of the charts and of the page"
    assert not re.search(r"""(src|href)=["']?(?!data:)\w+:""", page.replace("https://www.chartjs.org", ""))
    found = re.search(r'id="record">(.*?)</script>', page)
    assert found
    inside, expected = json.loads(found[1]), read_record(run_dir)
    assert {**inside, "read": 0} == {**expected, "read": 0}
    assert inside["samples"][0]["prompt"] == HOSTILE


def test_several_runs_are_compared_by_figures_curves_and_the_settings_that_differ(
    run_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "a run"
    shutil.copytree(run_dir, other)
    with (other / "metrics.jsonl").open("a") as file:
        file.write("\n" + event("evaluated", 9, step=4, accuracy=0.5, accuracy_maths=0.5, pass_at_4_maths=0.9, tasks=4))
    (run_dir / "config.toml").write_text("[run]\nseed = 1\n[trainer]\nlearning_rate = 1e-3\nranks = 2\n")
    (other / "config.toml").write_text(
        "[run]\nseed = 1\n[trainer]\nlearning_rate = 2e-3\nranks = 2\n[trainer.lora]\nrank = 4\n"
    )
    done = run("report", str(run_dir), str(other))
    assert (done.exit_code, done.stdout) == (0, f"the report is {run_dir / 'comparison.html'}\n")
    found = re.search(r'id="record">(.*?)</script>', (run_dir / "comparison.html").read_text())
    assert found
    record = json.loads(found[1])
    assert [each["name"] for each in record["runs"]] == [str(run_dir), str(other)], "they have the same name otherwise"
    assert record["differences"] == [
        {"name": "trainer.learning_rate", "values": ["0.001", "0.002"]},
        {"name": "trainer.lora.rank", "values": ["", "4"]},
    ]
    figures = [{each["name"]: each["value"] for each in one["figures"]} for one in record["runs"]]
    assert [each["held-out accuracy, last"] for each in figures] == [0.75, 0.5]
    assert (figures[1]["held-out accuracy maths, first"], figures[1]["held-out pass@4 maths, first"]) == (0.5, 0.9)
    assert [(one["began"] - BEGAN, len(one["steps"]), len(one["evaluations"])) for one in record["runs"]] == [
        (0.0, 4, 2),
        (0.0, 4, 3),
    ]
    assert all(not one["samples"] for one in record["runs"])


def test_what_is_no_run_and_a_place_that_cannot_be_written_are_refused_in_a_line(run_dir: Path, tmp_path: Path) -> None:
    assert_refused("is not the directory of a run", "report", str(tmp_path))
    assert_refused("is not the directory of a run", "report", str(tmp_path / "nowhere"), "--serve")
    (tmp_path / DATABASE).write_bytes(b"no database" * 1000)
    for place in ("nowhere/x.html", f"{DATABASE}/x.html", "x" * 250):
        unwritable = run("report", str(run_dir), "--out", str(tmp_path / place))
        assert unwritable.exit_code == 1
        assert unwritable.stderr.startswith("error: report: cannot write")
    assert run("report", str(tmp_path)).exit_code == 1


def test_a_service_is_shown_by_its_models_queues_and_samplers_while_it_writes(tmp_path: Path) -> None:
    store = Store(tmp_path / DATABASE)
    model = {"session": "s-1", "client": HOSTILE, "state": "ready", "created": BEGAN}
    for name, used in (("s-1:train:0", BEGAN), ("s-1:train:1", BEGAN + 1)):
        store.insert("models", id=name, used=used, about={"config": {"rank": 4}}, **model)
    for seq, kind in enumerate(("optim_step", "optim_step", "forward_backward")):
        Futures(store).accept(kind, "s-1:train:1", seq, "alice", b"")
    store.finish("s-1:train:1:0", b"{}", "json", keep_payload=False)
    store.insert("samplers", id="x", session="s-1", client="alice", model="s-1:train:1", inflight=1, created=BEGAN)
    with store.transaction():  # as while it writes
        service = read_record(tmp_path)["service"]
    store.close()
    assert [(each["id"], each["rank"], each["steps"], each["queued"]) for each in service["models"]] == [
        ("s-1:train:1", 4, 1, 2),
        ("s-1:train:0", 4, 0, 0),
    ]
    assert [(each["kind"], each["queued"], each["done"]) for each in service["queues"]] == [
        ("forward_backward", 1, 0),
        ("optim_step", 1, 1),
    ]
    assert [(each["weights"], each["inflight"]) for each in service["samplers"]] == [("s-1:train:1", 1)]
    assert run("report", str(tmp_path), "--out", str(tmp_path / "x.html")).exit_code == 0
    assert "owned" in (tmp_path / "x.html").read_text()
    assert HOSTILE not in (tmp_path / "x.html").read_text()


@pytest.fixture
def server(run_dir: Path) -> Iterator[PageServer]:
    with PageServer(partial(read_live, run_dir), 0) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield served
        served.shutdown()
        thread.join(HANG_S)


def fetched(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=HANG_S) as answer:
        return str(answer.read().decode())


def test_a_run_that_goes_on_is_followed_and_no_page_of_the_web_can_read_it(server: PageServer, run_dir: Path) -> None:
    assert '"live":true' in fetched(server.url)
    assert json.loads(fetched(f"{server.url}record.json"))["steps"][-1]["step"] == 4
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\n" + step(5, 10))
    assert json.loads(fetched(f"{server.url}record.json"))["steps"][-1]["step"] == 5
    for url, host, code in ((server.url, "evil.example:80", 403), (f"{server.url}etc/passwd", "localhost", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(url, Host=host)
        assert refused.value.code == code
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(urllib.error.HTTPError, match="500") as gone:
        fetched(f"{server.url}record.json")
    assert "is not the directory of a run" in gone.value.read().decode()
