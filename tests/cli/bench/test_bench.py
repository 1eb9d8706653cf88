"""``weightlane bench`` with real processes: what it reports, what it refuses, its exit codes, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import StagingMemoryError, WorkerDiedError
from weightlane.cli.bench import measure
from weightlane.cli.bench.measure import run_bench
from weightlane.cli.bench.processes.processes import Processes
from weightlane.cli.bench.report.bench_report import BenchReport
from weightlane.cli.bench.report.latency_fit import LatencyFit
from weightlane.cli.bench.report.plot import plot_title
from weightlane.cli.bench.settings import BenchSettings
from weightlane.cli.bench.workload.workload import named_workload

SPREAD = {"median", "min", "max"}
ROW = {
    "engine", "codec", "integrity", "density", "payload_bytes", "wire_bytes", "trainer_blocked_s",
    "trainer_blocked_without_step_s", "rollout_blocked_s", "latency_s", "raw_transport_s", "phases", "extra_bytes",
    "slowdown", "rounds", "verified", "fit",
}  # fmt: skip


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), "end of the processes")


def is_spread(plain: Any) -> bool:
    return set(plain) == SPREAD and 0 <= plain["min"] <= plain["median"] <= plain["max"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Processes]]:
    """The processes of every benchmark that the test runs."""
    made: list[Processes] = []

    class Noted(Processes):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(measure, "Processes", Noted)
    yield made
    for processes in made:
        wait_until_gone(processes.pids)


def test_tables_a_plot_and_a_report_that_holds_exactly_what_it_promises_come_of_one_run(
    started: list[Processes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = SimpleNamespace(checked=partial(BenchSettings.checked, loop_s=0.05))
    monkeypatch.setattr("weightlane.cli.commands.bench.BenchSettings", short)
    json_file, plot_file, work = tmp_path / "report.json", tmp_path / "report.png", tmp_path / "work"
    work.mkdir()
    result = run(
        "bench", "--engine", "shm", "--engine", "filesystem", "--engine", "hccl", "--codec", "dense", "--codec", "delta",
        "--receivers", "1", "--rounds", "1", "--density", "0.02", "--loops", "--fit", "--deadline-s", str(HANG_S),
        "--work-dir", str(work), "--set", "shm.max_shared_mib=64", "--out", str(json_file), "--out", str(plot_file),
        columns=220,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("tiny: 24 tensors", "shm", "yes", "torch_npu is not installed", "every receiver copies it at once"):
        assert text in result.output
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    report = BenchReport.model_validate_json(json_file.read_text())
    assert re.search(r"^\w+: rollout stops for .*x one copy", plot_title(report))
    plain = report.model_dump(mode="json")
    assert set(plain) == {"machine", "setup", "limits", "blocking", "rows", "unavailable", "notes"}
    assert set(plain["limits"]) == {"memcpy_s", "memcpy_all_receivers_s", "copy_in_then_out_s"}
    assert set(plain["blocking"]) == {"trainer_blocked_s", "rollout_blocked_s", "latency_s"}
    assert all(map(is_spread, [*plain["limits"].values(), *plain["blocking"].values()]))
    assert plain["unavailable"] == {"hccl": "hccl cannot run here: torch_npu is not installed."}
    payload = named_workload("tiny").nbytes
    for row in plain["rows"]:
        assert set(row) == ROW
        assert (row["rounds"], row["verified"], row["density"], row["payload_bytes"]) == (1, True, 0.02, payload), row[
            "codec"
        ]
        assert list(row["phases"]) == ["export", "pack", "transfer", "stage", "verify", "commit"]
        times = [row[key] for key in ROW if key.endswith("_s")]
        assert all(map(is_spread, [*times, *row["phases"].values()]))
        assert all(row[key]["min"] > 0 for key in ("raw_transport_s", "latency_s", "rollout_blocked_s"))
        assert all(row["slowdown"][loop] > 0 for loop in ("trainer", "decode"))
        assert row["fit"]["payload_bytes"][::2] == [named_workload("tiny").part(1 / 16).nbytes, payload]
    assert LatencyFit.through([10**6, 10**8], [0.0305, 0.08]).fixed_s == pytest.approx(0.03), "2 GB/s"
    for engine in ("shm", "filesystem"):
        dense, delta = (row for row in report.rows if row.engine == engine)
        assert payload <= dense.wire_bytes < 1.02 * payload
        assert delta.wire_bytes < 0.05 * payload
    assert len(started) == 3, "sizes"
    assert list(work.iterdir()) == []


def test_where_memory_is_short_rows_are_measured_one_at_a_time_and_what_arrives_changed_is_reported(
    started: list[Processes], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Processes.every

    def one_bit_off(processes: Processes, method: str, *arguments: Any, **more: Any) -> list[Any]:
        first, *others = ask(processes, method, *arguments, **more)
        return [first, *(crc ^ 1 for crc in others)] if (method, *arguments) == ("crc", "none") else [first, *others]

    payload = named_workload("tiny").nbytes
    monkeypatch.setattr(measure, "available_bytes", lambda _: 8 * payload)
    monkeypatch.setattr(Processes, "every", one_bit_off)
    report = run_bench(BenchSettings(codecs=("fp8", "dense"), receivers=1, rounds=1, deadline_s=HANG_S))
    assert isinstance(report, BenchReport)
    fp8, dense = report.rows
    assert (fp8.verified, dense.verified, report.verified) == (True, False, False)
    assert fp8.wire_bytes < 0.7 * dense.wire_bytes, "the embedding, a sixth of the model, stays in two bytes"
    assert any("was reconnected" in note for note in report.notes)
    monkeypatch.setattr(measure, "available_bytes", lambda _: 5 * payload)
    with pytest.raises(StagingMemoryError, match=r"needs .* GiB, but .* GiB are free"):
        run_bench(BenchSettings(receivers=1, rounds=1))


def test_a_process_that_is_killed_in_mid_run_ends_it_with_its_name_and_leaves_nothing(
    started: list[Processes], tmp_path: Path
) -> None:
    def say(words: str) -> None:
        if words.startswith("round 1 "):
            assert list(tmp_path.iterdir())
            threading.Thread(target=os.kill, args=(started[0].pids[2], signal.SIGKILL)).start()

    with pytest.raises(WorkerDiedError) as caught:
        run_bench(BenchSettings(rounds=1000, deadline_s=NEVER_S, directory=tmp_path), say)
    assert caught.value.peer == "receiver-1"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--engine", "hccl", "--json"], 1, "torch_npu is not installed"),
        (["--engine", "shn"], 2, "Did you mean 'shm'?"),
        (["--model", "nowhere"], 2, "'nowhere' is neither a model that the benchmark knows nor a directory"),
        (["--engine", "shm", "--engine", "shm"], 2, "twice"),
        (["--codec", "fp8", "--codec", "delta"], 2, "after fp8 the receivers hold rounded weights"),
        (["--set", "shm.slot=3"], 2, "checkpoint_engine.options.slot"),
        (["--rounds", "0"], 2, "rounds: Input should be greater than or equal to 1 (got 0)"),
        (["--set", "gloo.host=1"], 2, "options are given for gloo, which is not measured"),
        (["--out", "/nowhere/at/all.json"], 2, "there is no directory /nowhere/at"),
        (["--out", "report.docx"], 2, "report.docx does not end with a format that matplotlib can write. Formats: "),
        (["--set", "shm=1"], 2, "--set 'shm=1' does not have the form engine.key=value"),
        (["--rounds", "many"], 2, "Usage: "),
    ],
)
def test_what_cannot_be_done_is_said_in_words_before_a_process_starts(
    started: list[Processes], arguments: list[str], code: int, said: str
) -> None:
    result = run("bench", *arguments, columns=220)
    assert result.exit_code == code
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not started


PEAKS = """
import mmap, time, torch
from weightlane.cli.bench.processes.peak_memory import PeakMemory
watches = PeakMemory(shared=False), PeakMemory(shared=True)
private = torch.ones(48 << 20, dtype=torch.uint8)
shared = mmap.mmap(-1, 32 << 20)
torch.frombuffer(shared, dtype=torch.uint8).fill_(1)
while any(watch._peak - watch._before < held << 20 for watch, held in zip(watches, (44, 76))):
    time.sleep(0.01)
del private
print(*(watch.stop() for watch in watches))
"""


def test_peak_memory_is_what_was_held_meanwhile_and_shared_memory_counts_where_it_is_made(children: Any) -> None:
    status, out, err = children.run(["-c", PEAKS], forked=True)  # no other test's thread frees memory there
    assert status == 0, err
    private_only, everything = map(int, out.split())
    assert private_only in range(44 << 20, 64 << 20)
    assert everything in range(76 << 20, 96 << 20)
