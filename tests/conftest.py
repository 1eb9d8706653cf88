"""Fixtures for every folder: child processes that never outlive a test, free ports, and a check for leftovers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import types
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
import helper_paths

# isort: split
import budget
import ports
from cpu_paths import WITH_AMX, cpu_has_amx, hide_amx
from fork_server import ForkedPopen, fork_workers, has_server
from waiting import HANG_S

budget.watch()
hide_amx()

# Some machines keep Python from storing what it compiles: each of the hundreds of processes would compile the same modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts background jobs with Ctrl-C ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported. Threads of OpenMP that wait for one another spin, and three workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A few lines of vLLM's sampler would cost each worker several CPU seconds, and a compiler as many again, and compute the same.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# torch asks the name server for the name of every address that it connects to; one that drops a question costs five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Ray gives way to every other process with all it starts (niceness 15): beside other tests its tests would hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")

# vLLM keeps there what it found out about a model class, in a process of its own: tests that are given another home need it, too.
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path("~/.cache/vllm").expanduser()))

# Every run draws the same examples: what is red here is red everywhere. `make fuzz` draws others, for as long as it is told to.
# How long an example takes says nothing on a machine that runs other tests beside it.
TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("tests", derandomize=True, max_examples=40, **TIMELESS)
hypothesis.settings.register_profile("fuzz", derandomize=False, max_examples=1000, print_blob=True, **TIMELESS)
hypothesis.settings.load_profile(os.environ.get("WEIGHTLANE_TEST_PROFILE", "tests"))

_LANES = (
    (
        "tests/rollout/",
        "tests/cli/test_layout_command.py",
        "tests/cli/test_plan_command.py",
    ),  # share vLLM and its engines
    ("tests/e2e/",),  # whole runs
    ("tests/packaging/test_", "tests/packaging/installs/test_declared"),  # look at the same syntax trees
)
"""Tests that one worker runs from end to end."""
_LONG = ("tests/packaging/installs/", "tests/trainer/")
"""Folders of files that take long: begun last, one of them would keep one worker while the others have nothing left to do."""


def _lane(nodeid: str) -> int:
    return next((number for number, paths in enumerate(_LANES) if nodeid.startswith(paths)), len(_LANES))


def pytest_configure(config: pytest.Config) -> None:
    """Let `budget` count what the tests cost."""
    config.pluginmanager.register(budget)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark properties; the lanes first, then the long files and the rest, which whoever is free runs file by file."""
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
    items.sort(key=lambda item: (_lane(item.nodeid), not item.nodeid.startswith(_LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Before pytest-xdist starts its workers: what their tests import is imported once, for all of them."""
    fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """How pytest-xdist deals out tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            lane = _lane(nodeid)
            return str(lane) if lane < len(_LANES) else nodeid.partition("::")[0]

    return Lanes(config, log)


_CAN_FORK = importlib.util.find_spec("vllm") is not None
"""Whether there is a fork server: `make gpu` runs a few tests on machines that have only torch."""


class Children:
    """Starts Python programs and reaps them, with everything they started, at the end."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, arguments: Sequence[str], *, forked: bool = False, **options: Any) -> subprocess.Popen[str]:
        """Start ``python <arguments>`` in a process group of its own, single-threaded in torch.

        Args:
            forked: Whether it comes from the fork server, and so has imported vLLM already.
        """
        env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        start = ForkedPopen if forked and _CAN_FORK else subprocess.Popen
        child = start([sys.executable, *arguments], env=env, text=True, start_new_session=True, **options)
        self._started.append(child)
        return child

    def run(self, arguments: Sequence[str], timeout_s: float = HANG_S, **options: Any) -> tuple[int, str, str]:
        """Run a program to its end; its exit status, standard output and standard error."""
        child = self.start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        output, errors = child.communicate(timeout=timeout_s)
        return child.returncode, output, errors

    def reap(self) -> None:
        """Kill whatever still runs."""
        for child in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._started:
            child.wait(timeout=HANG_S)
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._started.clear()


@pytest.fixture
def children() -> Iterator[Children]:
    """Child processes of one test."""
    started = Children()
    yield started
    started.reap()


@pytest.fixture(scope="session")
def session_children() -> Iterator[Children]:
    """Child processes shared by many tests."""
    started = Children()
    yield started
    started.reap()


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test, and the processes that it starts, use AMX. A test that asks for this is skipped where the CPU has none."""
    if not cpu_has_amx():
        pytest.skip("this CPU has no AMX")
    for name, value in WITH_AMX.items():
        monkeypatch.setenv(name, value)


_FORKING = types.SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPopen})


@pytest.fixture
def forked_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weightlane start its helper processes as forks of a process that has already imported vLLM."""
    monkeypatch.setattr("weightlane.ckpt_engines.runtime.own_process.subprocess", _FORKING)


@pytest.fixture(scope="module", autouse=True)
def forked_helpers() -> Iterator[None]:
    """Where this process has a fork server, as each worker of pytest-xdist, also let weightlane's own fork servers be forked."""
    with pytest.MonkeyPatch.context() as patch:
        if has_server():
            patch.setattr("weightlane.ckpt_engines.runtime.fork_server.subprocess", _FORKING)
        yield


@pytest.fixture
def free_port() -> int:
    """See `ports.free_port`."""
    return ports.free_port()


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="wl-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def s3_options(session_children: Children) -> dict[str, str]:
    """fsspec's storage options for an S3 API on loopback, with an empty bucket called ``weights``."""
    program = str(helper_paths.TESTS / "ckpt_engines/engines/filesystem/s3_server.py")
    server = session_children.start([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    options = {"endpoint_url": server.stdout.readline().strip(), "key": "test", "secret": "test"}
    fsspec.filesystem("s3", **options).mkdir("weights")
    return options


@pytest.fixture
def s3_url(s3_options: dict[str, str]) -> str:
    """A place of its own in that bucket; opened with `s3_options`."""
    return f"s3://weights/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of its own on this machine."""
    ray = pytest.importorskip("ray")
    from weightlane.cli.run.ray_cluster import patient_ray

    # One home for all modules of a process: Ray keeps the token that it wrote there in memory, does not write it again,
    # and its server, which reads the file, would not start under another home.
    home = tmp_path_factory.getbasetemp() / "ray-home"
    home.mkdir(exist_ok=True)
    # Ray's sockets have paths of limited length, so its files cannot lie in pytest's folder. Where it does not start, they stay:
    # its logs say why.
    short = Path(tempfile.mkdtemp(prefix="wl-ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        with patient_ray(HANG_S):
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=str(short))
        yield
        ray.shutdown()
    shutil.rmtree(short, ignore_errors=True)
