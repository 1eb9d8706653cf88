"""Hooks: whoever listens hears everything in order, and nothing a listener does can hurt what it listens to."""

from __future__ import annotations

import gc
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightlane.plugins import HOOK_NAMES, Facts, RunHooks, hookimpl, make_hooks
from weightlane.plugins.disabled_plugins import REPORT_FILE_ENV, reported_in

ARGUMENTS: dict[str, Any] = {
    "version": 7,
    "index": 3,
    "step": 5,
    "rank": 1,
    "replica": "rollout-0",
    "kind": "step",
    "turn": "training",
    "facts": {"a": 1},
}


def plugin(**methods: Callable[..., Any]) -> object:
    return type("Plugin", (), methods)()


class Listener:
    """Notes versions; raises `error` at the ones it is told to."""

    def __init__(self, heard: list[tuple[str, int]], name: str = "", fails_at: int = -1, error: str = "boom") -> None:
        self.heard, self.name, self.fails_at, self.error = heard, name, fails_at, error

    @hookimpl
    def version_committed(self, version: int) -> None:
        if version == self.fails_at:
            raise ValueError(self.error)
        self.heard.append((self.name, version))

    @hookimpl
    def version_staged(self, version: int) -> None:
        self.heard.append((self.name, version))


def test_every_hook_calls_those_who_listen_with_the_arguments_they_take() -> None:
    for name in HOOK_NAMES:
        heard: list[dict[str, Any]] = []
        names = list(inspect.signature(getattr(RunHooks, name)).parameters)[1:]
        hooks = RunHooks()
        # It takes exactly the hook's arguments, as an author writes it.
        method = eval(
            f"lambda self, {', '.join(names)}: heard.append(dict({', '.join(f'{n}={n}' for n in names)}))", locals()
        )
        assert hooks.register(plugin(**{name: hookimpl(method)}))
        getattr(hooks, name)(**{key: ARGUMENTS[key] for key in names})
        assert heard == [{key: ARGUMENTS[key] for key in names}]
        assert hooks.reports == ()


def test_a_plugin_that_raises_is_reported_once_and_not_called_again_and_the_others_hear_everything() -> None:
    heard: list[tuple[str, int]] = []
    listeners = [Listener(heard, str(number), fails_at) for number, fails_at in enumerate([3, 3, -1, 0])]
    hooks = make_hooks(listeners)
    for version in range(6):
        hooks.version_committed(version=version, facts={})
    hooks.version_staged(version=6, facts={})
    for listener in listeners:
        mine = [version for name, version in heard if name == listener.name]
        assert mine == list(range(7 if listener.fails_at < 0 else listener.fails_at)), "all its hooks are silent"
    assert len(hooks.reports) == 3


def test_a_report_names_plugin_hook_and_error_in_the_log_and_in_the_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(REPORT_FILE_ENV, str(tmp_path / "logs" / "plugins.log"))
    hooks = RunHooks()
    hooks.register(Listener([], fails_at=1, error="no\nroom"), "my-plugin")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            hooks.version_committed(version=1, facts={})
    said = "plugin my-plugin was disabled: version_committed raised ValueError: no room"
    assert [str(report) for report in hooks.reports] == [said]
    ours = [record.getMessage() for record in caplog.records if "my-plugin" in record.getMessage()]
    assert ours == [said]
    assert reported_in(tmp_path / "logs" / "plugins.log") == [said]
    assert "raise ValueError(self.error)" in (tmp_path / "logs" / "plugins.log").read_text(), "with its traceback"
    assert reported_in(tmp_path / "nowhere.log") == []


def test_what_ends_a_program_passes() -> None:
    def run_ended(self: object) -> None:
        raise KeyboardInterrupt

    hooks = make_hooks([plugin(run_ended=hookimpl(run_ended))])
    with pytest.raises(KeyboardInterrupt):
        hooks.run_ended(facts={})
    assert hooks.reports == ()


def wrapper(self: object) -> Any:
    return (yield)


async def asynchronous(self: object) -> None: ...


def greedy(self: object, facts: Facts, version: int) -> None: ...


@pytest.mark.parametrize(
    ("run_ended", "said"),
    [
        (hookimpl(wrapper=True)(wrapper), "run_ended is a hook wrapper, which could change what weightlane does"),
        (hookimpl(asynchronous), "run_ended must be a plain function"),
        (hookimpl(greedy), "{'version'} are declared in the hookimpl but can not be found"),
    ],
)
def test_a_plugin_that_cannot_be_called_is_refused_with_the_reason_and_the_others_stay(
    run_ended: Callable[..., Any], said: str
) -> None:
    heard: list[tuple[str, int]] = []
    hooks = RunHooks()
    assert not hooks.register(plugin(run_ended=run_ended))
    assert hooks.register(Listener(heard))
    hooks.run_ended(facts={})
    hooks.version_committed(version=1, facts={})
    assert heard == [("", 1)]
    (report,) = hooks.reports
    assert said in str(report)


def test_a_hook_that_does_not_exist_is_pointed_out_and_the_rest_is_called(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    methods = {"version_comitted": lambda self: heard.append("never"), "run_ended": lambda self: heard.append("ended")}
    hooks = RunHooks()
    with caplog.at_level(logging.WARNING):
        assert hooks.register(plugin(**{name: hookimpl(method) for name, method in methods.items()}), "typo")
    assert "plugin typo implements version_comitted, which is no hook of this weightlane" in caplog.text
    hooks.run_ended(facts={})
    assert heard == ["ended"]


def test_a_hook_that_nobody_listens_to_calls_nothing() -> None:
    hooks = RunHooks()
    called: list[str] = []
    gc.disable()  # what garbage calls at its end would be seen, too
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        hooks.bucket_sent(version=1, index=2, facts={})
    finally:
        sys.setprofile(None)
        gc.enable()
    assert called == ["bucket_sent", "_call"]
