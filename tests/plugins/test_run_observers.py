"""`[observers]` of a run: nothing unless asked for, mistakes are named before anything starts, and ends are clean."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trace_format import load
from waiting import HANG_S

from weightlane.ckpt_engines import AddressInUseError, ConfigError
from weightlane.cli.config.run_config import ObserversSection, RunConfig, load_config
from weightlane.cli.run.open_observers import RunObservers, metrics_endpoint
from weightlane.plugins import hookimpl, process_hooks
from weightlane.plugins.disabled_plugins import REPORT_FILE_ENV
from weightlane.plugins.trace.observer import TRACE_ENV, TraceObserver
from weightlane.plugins.trackers import TRACKERS

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "arithmetic.toml"
FACTS = {"seconds": 0.001, "nbytes": 8, "participant": "trainer-0"}


def configured(*overrides: str) -> RunConfig:
    return load_config(EXAMPLE, [f"observers.{override}" for override in overrides])


def observers(tmp_path: Path, said: list[str], own: Any = (), **section: Any) -> RunObservers:
    return RunObservers(ObserversSection(**section), tmp_path, own, said.append)


def test_a_run_that_asks_for_nothing_opens_writes_and_says_nothing_whatever_the_shell_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_ENV, str(tmp_path / "elsewhere.json"))
    assert configured().observers == ObserversSection()
    said: list[str] = []
    with observers(tmp_path / "run", said) as hooks:
        hooks.run_started(facts={"step": 0, "steps": 1})
        hooks.training_step(step=1, facts={"seconds": 0.1})
        hooks.run_ended(facts={})
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_trackers_show_a_configuration_without_keys_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def tracker(*settings: Any) -> Any:
        shown.extend(settings)
        return SimpleNamespace(open=lambda: None, close=lambda: None)

    monkeypatch.setitem(TRACKERS, "wandb", tracker)
    options = {"root": "s3://bucket", "storage_options": {"secret": "S"}}
    extra = {"api_key": "S", "hf-token": "S", "max_tokens": 3, "tools": [{"headers": {"authorization": "S"}}]}
    settings = {"checkpoint_engine": {"options": options}, "extra_engine_args": extra}
    with RunObservers(ObserversSection(wandb="p"), tmp_path, (), shown.append, settings):
        left = {"max_tokens": 3, "tools": [{}]}
        assert {"checkpoint_engine": {"options": {"root": "s3://bucket"}}, "extra_engine_args": left} in shown


def test_a_missing_library_is_named_with_what_to_install_and_an_open_endpoint_wants_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    for key, library, extra in (
        ("tensorboard=board", "tensorboardX", "observability"),
        ("prometheus_port=0", "prometheus_client", "observability"),
        ("wandb=p", "wandb", "trackers"),
        ("mlflow=p", "mlflow", "trackers"),
        ("trackio=p", "trackio", "trackers"),
    ):
        with monkeypatch.context() as without:
            without.setattr("importlib.util.find_spec", lambda name, no=library: None if name == no else found(name))
            with pytest.raises(ConfigError, match=rf"needs {library}.*pip install 'weightlane\[{extra}\]'"):
                configured(key)
    monkeypatch.delenv("WEIGHTLANE_PROMETHEUS_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*WEIGHTLANE_PROMETHEUS_TOKEN"):
        configured("prometheus_host=0.0.0.0", "prometheus_port=0")
    monkeypatch.setenv("WEIGHTLANE_PROMETHEUS_TOKEN", "a token")
    for host in ("192.0.2.1", "é" * 70):
        with pytest.raises(AddressInUseError, match=r"prometheus_host is an address of this machine"):
            metrics_endpoint(0, host)


class Unreachable(TRACKERS["mlflow"]):  # type: ignore[misc]
    """A tracker whose server does not answer at the start, or at the end."""

    at_end = False

    library = "json"

    def _open(self) -> str:
        if not self.at_end:
            raise OSError("no answer.")
        return "open"

    def _write(self, *_: object) -> None:
        pass

    def _close(self, _: object) -> None:
        raise OSError("no answer")


def test_a_tracker_that_does_not_answer_ends_a_run_before_it_starts_and_no_run_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("weightlane.cli.run.open_observers.TRACKERS", {"mlflow": Unreachable})
    with pytest.raises(ConfigError, match=r"cannot log to mlflow: OSError: no answer\. Log in to mlflow"):
        observers(tmp_path, said, mlflow="p").__enter__()
    monkeypatch.setattr(Unreachable, "at_end", True)
    with observers(tmp_path, said, mlflow="p") as hooks:
        hooks.training_step(step=1, facts={"reward": 0.5})
    assert said == ["mlflow did not take everything: OSError: no answer"]
    hangs = threading.Event()
    monkeypatch.setattr("weightlane.cli.run.open_observers._TRACKER_S", 0.05)
    monkeypatch.setattr(Unreachable, "_close", lambda *_: hangs.wait(HANG_S))
    with observers(tmp_path, said, mlflow="p") as hooks:
        hooks.training_step(step=1, facts={"reward": 0.5})
    assert said[1:] == ["mlflow did not take everything: TimeoutError: no answer within 0.05 s"]
    hangs.set()


def test_a_taken_port_ends_the_run_before_it_starts_and_leaves_the_environment_as_it_was(
    tmp_path: Path, free_port: int
) -> None:
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", free_port)):
        entered = observers(tmp_path, [], prometheus_port=free_port, trace=Path("trace.json"))
        with pytest.raises(AddressInUseError, match=rf"127\.0\.0\.1:{free_port}.*prometheus_port"):
            entered.__enter__()
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_merged_after_an_error_with_what_other_processes_wrote(tmp_path: Path) -> None:
    said: list[str] = []
    run = observers(tmp_path, said, trace=Path("trace.json"), trace_limit_mib=1e-3)
    other = TraceObserver(Path(run.environment[TRACE_ENV]), float(run.environment["WEIGHTLANE_TRACE_LIMIT_MIB"]))

    def fail() -> None:
        with run as hooks:
            hooks.run_started(facts={})
            for index in range(20):
                other.bucket_sent(version=1, index=index, facts=FACTS)
            raise RuntimeError("the run failed")

    with pytest.raises(RuntimeError, match="the run failed"):
        fail()
    trace = load(tmp_path / "trace.json")
    assert sorted(trace.processes.values()) == ["driver", "trainer-0"]
    assert said[0].endswith(f"events: {tmp_path}/trace.json")
    assert said[1] == "the trace is incomplete: observers.trace_limit_mib was reached by trainer-0"
    assert os.environ.get(TRACE_ENV) is None


def test_plugins_that_were_disabled_are_told_of_at_the_end_once_and_those_of_earlier_runs_are_not(
    tmp_path: Path,
) -> None:
    class Raises:
        @hookimpl
        def run_ended(self) -> None:
            raise ValueError("boom")

    for _ in range(2):
        said: list[str] = []
        run = observers(tmp_path, said, [Raises()])
        with run as hooks:
            assert os.environ[REPORT_FILE_ENV] == str(tmp_path / "logs" / "plugins.log")
            hooks.run_ended(facts={})
            # Another process of the run has the same plugin, and a bad one of its own.
            there = process_hooks()
            there.report("other", "version_staged", OSError("no room"))
        (mine, other) = said
        assert "Raises was disabled: run_ended raised ValueError: boom (details: " in mine
        assert (
            other
            == f"plugin other was disabled: version_staged raised OSError: no room (details: {tmp_path}/logs/plugins.log)"
        )
