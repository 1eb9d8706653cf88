"""The Ray cluster of a run: a new one on this machine, or a running one."""

from __future__ import annotations

import getpass
import ipaddress
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightlane.ckpt_engines import ConfigError, Deadline, WorkerDiedError
from weightlane.ckpt_engines.runtime.process_tree import children_by_parent
from weightlane.plugins.prometheus import LOOPBACK
from weightlane.rollout.config import RolloutConfig

from ..config.run_config import RaySection
from .cleanup_process import CleanupProcess, keep_logs
from .resources import Machines

_QUIET = {
    # Otherwise Ray would print its own report of every process that dies.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The C++ side of torch's stores logs a stack trace for every connection that ends.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_POLL_S = 0.1
_STARTS = 3
"""Attempts to start Ray until its raylet stays alive. Ray chooses ports that another process may take before the raylet does."""


class _RayletDiedError(Exception):
    """Ray's raylet has died before its node registered. Ray itself would continue to wait for it."""


@contextmanager
def patient_ray(timeout_s: float) -> Iterator[None]:
    """Let a Ray that starts inside take up to `timeout_s`.

    Ray gives its node 30 seconds, and no setting changes that. On a busy machine, starting the node's processes takes as long.
    A raylet that has died meanwhile is not waited for.
    """
    from ray._private import services  # noqa: PLC0415 - optional

    get_node, deadline = getattr(services, "get_node", None), Deadline.after(timeout_s)
    before = set(_started_here())
    if get_node is None:  # another version of Ray
        yield
        return

    def wait_for_node(*arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return get_node(*arguments, **named)
            except RuntimeError:  # the node has not registered yet
                if deadline.expired:
                    raise
                started = [command for process, command in _started_here().items() if process not in before]
                if started and not any(map(_is_raylet, started)):
                    raise _RayletDiedError("Ray's raylet has died while it started.") from None
                time.sleep(_POLL_S)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


def _is_raylet(command: str) -> bool:
    return command.split("\0", maxsplit=1)[0].endswith("raylet/raylet")


def _started_here() -> dict[int, str]:
    """Command lines by process id of the processes that this one started; empty text for one that has ended."""
    found: dict[int, str] = {}
    for child in children_by_parent()[os.getpid()]:
        found[child] = ""
        with suppress(OSError):
            found[child] = Path(f"/proc/{child}/cmdline").read_text(errors="replace")
    return found


def refuse_loopback(section: RaySection, host: str) -> None:
    """Raise `ConfigError` if ``sync.host``, which the machines of a running cluster connect to, is a loopback address."""
    if not section.address:
        return
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, UnicodeError):  # the rendezvous, which listens there, raises the error
        return
    if address.is_loopback:
        raise ConfigError(
            f"sync.host is {host}, which other machines of the cluster cannot reach.",
            part="configuration",
            hint="Set sync.host to this machine's address on the cluster's network.",
        )


@dataclass(frozen=True, slots=True)
class ClusterRoom:
    """What a Ray cluster has, as Ray's public functions tell."""

    machines: Mapping[str, Mapping[str, float]]
    """All resources of every living machine, by its id."""
    free: Mapping[str, float]
    """Resources of all machines together that nobody has reserved."""

    def further(self, rollout: RolloutConfig) -> int:
        """Return the number of further replicas for which there is room: together, and on machines that are large enough."""
        needs = {
            "CPU": rollout.tensor_parallel * rollout.cpus_per_rank,
            "GPU": rollout.tensor_parallel * (rollout.gpus_per_rank or 0.0),
        }
        return min(_times(self.free, needs), sum(_times(each, needs) for each in self.machines.values()))


def _times(there: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How often `needs` fit into what is there. Ray counts in ten thousandths."""
    fits = [there.get(name, 0.0) / amount for name, amount in needs.items() if amount]
    return math.floor(min(fits, default=0.0) + 1e-4)


class RayCluster:
    """A context manager in which Ray is initialized. Its end ends every process of a local cluster.

    A local cluster keeps its files in a temporary directory, which is removed. After a failure, the logs of its workers are first
    copied to `logs`, or those of Ray's own processes if these did not start.

    The run's processes reserve `cpus`, and get the variables in `environment`. `host` is this machine's address, at which the
    run's other machines must reach it; None if none of them has to. `killed_hint` says how to continue after the run's own
    process was killed.
    """

    def __init__(
        self,
        section: RaySection,
        cpus: float,
        logs: Path,
        environment: Mapping[str, str],
        host: str | None = None,
        killed_hint: str = "Use --resume to continue from the last saved state.",
    ) -> None:
        self._section, self._cpus, self._host = section, cpus, host
        self._killed_hint = killed_hint
        self._environment = dict(environment)
        self._logs = logs
        self._failed = True
        self._files: Path | None = None
        self._cleanup: CleanupProcess | None = None
        self._started = False

    def machines(self) -> Machines:
        """Return the number of GPUs of the cluster, with the GPU memory of this machine."""
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        here = Machines.here()
        return Machines(int(ray.cluster_resources().get("GPU", 0)), here.gpu_bytes)

    @staticmethod
    def room() -> ClusterRoom:
        """Return the machines of the cluster, and what is free. May block while Ray notices the death of one."""
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        machines = {node["NodeID"]: dict(node["Resources"]) for node in ray.nodes() if node["Alive"]}
        return ClusterRoom(machines, dict(ray.available_resources()))

    @property
    def cpus(self) -> float:
        """The CPUs of the cluster, as Ray counts them."""
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        return float(ray.cluster_resources().get("CPU", 0.0))

    def succeeded(self) -> None:
        """Note that the run succeeded, so that its logs are not kept."""
        self._failed = False

    def keep_logs(self) -> None:
        """Copy the logs of the run's processes so far, of which one has died and is started again. Never raises."""
        if self._files is not None:
            keep_logs(self._files, self._logs, "worker-*")

    def __enter__(self) -> Self:
        patience_s = math.ceil(self._section.start_timeout_s)
        settings = {
            "RAY_gcs_server_port_wait_time_s": str(patience_s),
            # The raylet ends itself if one of its agents has not answered by then.
            "RAY_agent_register_timeout_ms": str(1000 * patience_s),
        }
        if not self._section.address:
            # Duration of one attempt to find the node; `patient_ray` repeats it.
            settings["RAY_raylet_start_wait_time_s"] = "2"
            # Ray would start a worker for every CPU, and use none: a run's processes have environments of their own.
            settings["RAY_prestart_worker_first_driver"] = "0"
        for name, value in {**_QUIET, **settings}.items():
            os.environ.setdefault(name, value)
        try:
            if self._section.address:
                self._join()
            else:
                self._start()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        import ray  # noqa: PLC0415 - optional

        with suppress(Exception):  # the files below must be removed even if Ray's shutdown fails
            ray.shutdown()
        if self._files is not None:
            if self._failed:
                keep_logs(self._files, self._logs, *(("worker-*",) if self._started else ("gcs_server.*", "raylet.*")))
            shutil.rmtree(self._files, ignore_errors=True)
        if self._cleanup is not None:
            self._cleanup.dismiss()

    def _start(self) -> None:
        # A short path, because Ray creates Unix sockets in it, and their paths may have 107 characters at most.
        self._files = Path(tempfile.mkdtemp(prefix="weightlane-ray-"))
        self._cleanup = CleanupProcess(self._files, self._logs, self._killed_hint)
        self._keep_compiled_code(self._files)
        try:
            with patient_ray(self._section.start_timeout_s):
                for left in reversed(range(_STARTS)):
                    try:
                        self._start_once()
                        break
                    except _RayletDiedError:
                        if not left:
                            raise
                        self._kill_what_started()
        except Exception as error:  # Ray raises a plain Exception for a slow raylet
            raise WorkerDiedError(
                f"Ray did not start on this machine: {str(error).rstrip('.')}.",
                part="ray",
                hint="See gcs_server.* and raylet.* in the run's logs for the errors of Ray's own processes. If they were only"
                " slow, raise ray.start_timeout_s.",
            ) from error
        self._started = True

    def _start_once(self) -> None:
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        ray.init(
            address="local",  # even if RAY_ADDRESS names another cluster
            # Ray's CPUs are logical: a run on a small machine shares cores instead of waiting for more.
            num_cpus=max(int(self._cpus) + 1, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(self._files),
            _node_ip_address=self._host or LOOPBACK,
            # vLLM leaves files and sockets in the temporary directory when its processes are killed.
            runtime_env={"env_vars": {"TMPDIR": str(self._files), **self._environment}},
        )

    def _kill_what_started(self) -> None:
        """Kill the processes of a Ray that did not start. Ray would do so itself only when this process ends."""
        import ray  # noqa: PLC0415 - optional

        for process, command in _started_here().items():
            if f"{self._files}/session_" in command:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        ray.shutdown()

    def _join(self) -> None:
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        try:
            ray.init(
                address=self._section.address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": self._environment},
            )
        except Exception as error:  # Ray raises many types
            raise ConfigError(
                f"cannot join the Ray cluster at {self._section.address!r}: {str(error).rstrip('.')}.",
                part="ray",
                hint="Start one with `ray start --head`, or leave ray.address empty to use this machine. A cluster that checks"
                " tokens wants RAY_AUTH_MODE=token in the environment of every node and of this command.",
            ) from error

    @staticmethod
    def _keep_compiled_code(files: Path) -> None:
        """Keep the code that torch compiles, which it also stores in the temporary directory, for the next run."""
        with suppress(OSError, KeyError):  # a container's user id may have no name
            cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
            cache.mkdir(exist_ok=True)
            (files / cache.name).symlink_to(cache)
