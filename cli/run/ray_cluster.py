"""The Ray cluster of a run: one on this machine, or a running one."""

from __future__ import annotations

import getpass
import ipaddress
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightlane.ckpt_engines import ConfigError, Deadline, WorkerDiedError

from ..config import RunConfig
from .cleanup_process import CleanupProcess, keep_logs
from .resources import Machines

_QUIET = {
    # Ray would print its own account of every process that dies.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # The C++ side of torch's stores logs a stack trace for every connection that ends.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_POLL_S = 0.1


@contextmanager
def patient_ray(timeout_s: float) -> Iterator[None]:
    """Inside, a Ray that starts may take `timeout_s` to come up.

    It gives its node 30 seconds, which no setting changes, and beside other work the processes of that alone need as long.
    """
    from ray._private import services  # noqa: PLC0415 - as below

    look, deadline = getattr(services, "get_node", None), Deadline.after(timeout_s)
    if look is None:  # another Ray, which is left to itself
        yield
        return

    def wait_for_node(*arguments: Any, **named: Any) -> Any:
        while True:
            try:
                return look(*arguments, **named)
            except RuntimeError:  # it has not registered yet
                if deadline.expired:
                    raise
                time.sleep(_POLL_S)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = look


class RayCluster:
    """Context manager: Ray is initialized inside, and every process of a local cluster has ended after it.

    A local cluster keeps its files in a temporary directory, which is removed; after a failure the logs of its workers, or of
    Ray's own processes if these did not come up, are copied to `logs` first. Every process of the run has the variables of
    `environment`.
    """

    def __init__(self, config: RunConfig, logs: Path, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = dict(environment)
        self._logs = logs
        self._failed = True
        self._files: Path | None = None
        self._undertaker: CleanupProcess | None = None
        self._started = False

    def machines(self) -> Machines:
        """What there is to run on."""
        import ray  # noqa: PLC0415 - as below

        here = Machines.here()
        return Machines(int(ray.cluster_resources().get("GPU", 0)), here.gpu_bytes)

    def succeeded(self) -> None:
        """The run ended well: its logs are not needed."""
        self._failed = False

    def __enter__(self) -> Self:
        patience = {"RAY_gcs_server_port_wait_time_s": str(math.ceil(self._config.ray.start_timeout_s))}
        for name, value in {**_QUIET, **patience}.items():
            os.environ.setdefault(name, value)
        try:
            if self._config.ray.address:
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
        import ray  # noqa: PLC0415 - as below

        with suppress(Exception):  # whatever Ray thinks of its own end, the files below must go
            ray.shutdown()
        if self._files is not None:
            if self._failed:
                keep_logs(self._files, self._logs, *(("worker-*",) if self._started else ("gcs_server.*", "raylet.*")))
            shutil.rmtree(self._files, ignore_errors=True)
        if self._undertaker is not None:
            self._undertaker.dismiss()

    def _start(self) -> None:
        import ray  # noqa: PLC0415 - optional, and reads the environment when imported

        trainer, rollout = self._config.trainer, self._config.rollout
        cpus = (
            trainer.ranks * trainer.cpus_per_rank + rollout.replicas * rollout.tensor_parallel * rollout.cpus_per_rank
        )
        # Short: Ray puts Unix sockets below it, whose paths are limited to 107 characters.
        self._files = Path(tempfile.mkdtemp(prefix="weightlane-ray-"))
        self._undertaker = CleanupProcess(self._files, self._logs)
        self._keep_compiled_code(self._files)
        try:
            with patient_ray(self._config.ray.start_timeout_s):
                ray.init(
                    address="local",  # not the one that RAY_ADDRESS may name
                    # Logical CPUs: a run on a small machine shares its cores instead of waiting for more of them.
                    num_cpus=max(int(cpus) + 1, os.cpu_count() or 1),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _temp_dir=str(self._files),
                    _node_ip_address=self._config.sync.host,
                    # vLLM leaves files and sockets in the temporary directory, however its processes end.
                    runtime_env={"env_vars": {"TMPDIR": str(self._files), **self._environment}},
                )
        except Exception as error:  # Ray raises it bare for a raylet that is slow
            raise WorkerDiedError(
                f"Ray does not start on this machine: {str(error).rstrip('.')}.",
                part="ray",
                hint="Look at gcs_server.* and raylet.* in the run's logs for what its own processes ran into; if they were"
                " only slow, raise ray.start_timeout_s.",
            ) from error
        self._started = True

    def _join(self) -> None:
        import ray  # noqa: PLC0415 - as above

        if ipaddress.ip_address(socket.gethostbyname(self._config.sync.host)).is_loopback:
            raise ConfigError(
                f"sync.host is {self._config.sync.host}, which other machines of the cluster cannot reach.",
                part="configuration",
                hint="Set sync.host to this machine's address on the cluster's network.",
            )
        try:
            ray.init(
                address=self._config.ray.address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": self._environment},
            )
        except Exception as error:  # as above
            raise ConfigError(
                f"cannot join the Ray cluster at {self._config.ray.address!r}: {str(error).rstrip('.')}.",
                part="ray",
                hint="Start one with `ray start --head`, or leave ray.address empty to use this machine.",
            ) from error

    @staticmethod
    def _keep_compiled_code(files: Path) -> None:
        """What torch compiles, which it keeps in the temporary directory too, is there again for the next run."""
        cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        with suppress(OSError):
            cache.mkdir(exist_ok=True)
            (files / cache.name).symlink_to(cache)
