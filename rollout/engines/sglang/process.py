"""`ServerProcess`: an SGLang server of this replica's own, and the command line that it is started with."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weightlane.ckpt_engines import ConfigError

from ...config import RolloutConfig
from ...contract.cleaner import Cleaner

_CLOSE_S = 10.0
"""Most seconds until the cleaner has ended the server: longer than it waits before it kills."""
_TAIL_BYTES = 4000
_BY_CONTRACT = ("model", "model_path", "host", "port", "api_key", "config", "skip_tokenizer_init", "weight_version")
"""Options of the server that a replica sets, the token among them in the file ``config``."""


class ServerOptions(NamedTuple):
    """`RolloutConfig.extra_engine_args`, as this engine takes them."""

    server: str
    """Address of a server that runs already; empty to start one."""
    api_key: str
    """The ``--api-key`` of `server`; empty for none."""
    python: str
    """The Python of the environment that SGLang is installed in."""
    arguments: dict[str, Any]
    """Further options of ``sglang.launch_server``, with underscores."""


def options_of(config: RolloutConfig) -> ServerOptions:
    """Read the options. Raises `ConfigError` for some that contradict each other."""
    extra = dict(config.extra_engine_args)
    server, python = str(extra.pop("server", "")), str(extra.pop("python", sys.executable))
    api_key = str(extra.pop("api_key", "")) if server else ""
    if refused := [name for name in extra if server or name.replace("-", "_") in _BY_CONTRACT]:
        why = f"the server at {server} has been started" if server else "the replica sets them"
        raise ConfigError(
            f"rollout.extra_engine_args has {', '.join(refused)}, but {why}.",
            part="rollout",
            hint="Remove these options.",
        )
    return ServerOptions(server, api_key, python, extra)


class ServerProcess:
    """A server that listens on the loopback interface alone, and ends with this process.

    Args:
        config: Options of the replica.
        model_dir: The checkpoint that it loads.
        dtype: The dtype that it computes in.
        context_length: Most tokens of a request.
        version: The version that the checkpoint is served as.
    """

    def __init__(
        self, config: RolloutConfig, model_dir: Path, *, dtype: str, context_length: int, version: int
    ) -> None:
        options, self.token = options_of(config), secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self._secret = tempfile.NamedTemporaryFile("w", suffix=".yaml")  # noqa: SIM115 - as above
        # In a file, because every user of the machine can read command lines.
        self._secret.write(f"api-key: {self.token}\n")
        self._secret.flush()
        named: dict[str, Any] = {
            "model_path": model_dir,
            "host": "127.0.0.1",
            "port": port,
            "config": self._secret.name,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "weight_version": version,
            "dtype": dtype,
            "context_length": context_length,
            "max_running_requests": config.max_num_seqs,
            "mem_fraction_static": config.gpu_memory_utilization,
            "disable_cuda_graph": bool(config.enforce_eager),
            "log_level": "warning",
        } | options.arguments
        command = [options.python, "-m", "sglang.launch_server", *_flags(named)]
        environment = os.environ | {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "OMP_NUM_THREADS": str(config.threads_per_rank),
        }
        self._cleaner = Cleaner()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own Python
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as cause:
            self._cleaner.close()
            self._secret.close()
            self._log.close()
            raise ConfigError(
                f"the Python of SGLang's server cannot be started: {cause}.",
                part="sglang",
                hint="rollout.extra_engine_args.python names it.",
            ) from cause
        self._cleaner.watch(self._process.pid)

    @property
    def exit_code(self) -> int | None:
        """The server's exit code, or None while it runs."""
        return self._process.poll()

    def last_lines(self) -> str:
        """The end of the server's output."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()

    def close(self) -> None:
        """End the server and its children. Idempotent."""
        self._cleaner.begin()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._cleaner.close()
        with suppress(OSError):
            self._secret.close()
        self._log.close()


def _flags(named: dict[str, Any]) -> list[str]:
    """Options of a command line; without those that are None or False."""
    flags: list[str] = []
    for name, value in named.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.extend(map(str, value if isinstance(value, Sequence) and not isinstance(value, str) else [value]))
    return flags
