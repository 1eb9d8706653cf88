"""A running `weightlane tinker` for a benchmark that drives it by the public Tinker SDK."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from safetensors.torch import load_file

from weightlane.ckpt_engines import ConfigError, WeightlaneError

from .command import Report, finish

START_S, CALL_S = 300.0, 600.0
"""Longest start of the service, and longest single call of a client."""
TITLES = {"trainer rank": "ray::RankActor", "replica": "VLLM::EngineCore"}
"""Names of the processes that `Service.kill` kills, as `ps` shows them."""
_CONFIG = """
[run]
dir = "{directory}"
[model]
path = "{model}"
[service]
port = {port}
base_model = "{model}"
allow_anonymous = true
join_clients = {join_clients}
max_lora_rank = 8
restarts = 1000
[trainer]
niceness = 10
[rollout]
dtype = "float32"
max_model_len = 64
max_num_seqs = 64
kv_cache_memory_bytes = 67108864
adapter_slots = 4
[checkpoint_engine]
backend = "shm"
"""


class Service:
    """A running ``weightlane tinker``; `join_clients` says whether it computes requests of several clients together."""

    def __init__(self, model: Path, directory: Path, port: int, *, join_clients: bool = True) -> None:
        self.files, self._config, self._log = directory / "service", directory / "service.toml", directory / "output"
        settings = {"model": model.resolve(), "port": port, "join_clients": str(join_clients).lower()}
        self._config.write_text(_CONFIG.format(directory=self.files, **settings))
        self.url = f"http://127.0.0.1:{port}"
        self.process: psutil.Popen

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            command = [str(Path(sys.executable).with_name("weightlane")), "tinker", str(self._config)]
            self.process = psutil.Popen(command, stdout=log, stderr=log)
        self.wait()

    def wait(self) -> None:
        """Wait until it answers."""
        import httpx

        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/api/v1/healthz", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise WeightlaneError(f"the service does not answer: {self._log.read_text()[-2000:]}", part="benchmark")

    def kill(self, what: str) -> None:
        """Kill one of its processes, and see that it answers again."""
        if what == "service":
            self.process.kill()
            self.process.wait(60)
            self.start()
            return
        served = self._served()
        (victim,) = [each for each in self.process.children(recursive=True) if TITLES[what] in _title(each)]
        victim.kill()
        end = time.monotonic() + START_S
        while self._served() == served and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        self.wait()

    def _served(self) -> int:
        """How often it has said that it serves."""
        return self._log.read_text().count("TINKER_BASE_URL=")

    def memory(self) -> int:
        """Bytes of private memory of all its processes."""
        total = 0
        for each in [self.process, *self.process.children(recursive=True)]:
            try:
                total += each.memory_info().rss - each.memory_info().shared
            except psutil.Error:
                continue
        return total

    def stop(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)


def saved_tensors(service: Service, training: Any) -> dict[str, torch.Tensor]:
    """A client's adapter, by PEFT's names."""
    return tensors_at(service, training.save_state("compared", overwrite=True).result(CALL_S).path)


def tensors_at(service: Service, path: str) -> dict[str, torch.Tensor]:
    """The adapter that a client saved to `path`, by PEFT's names."""
    model, _, name = path.removeprefix("tinker://").split("/")
    (directory,) = (service.files / "checkpoints" / model.replace(":", ".") / "weights").glob(f"{name}~*")
    return load_file(directory / "adapter_model.safetensors")


def equal_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def with_service(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[Service, argparse.Namespace], Report],
    text: Callable[[Report], str],
    *,
    join_clients: bool = True,
) -> NoReturn:
    """Run a benchmark on a service that has been started, and end the program.

    Args:
        name: Of the benchmark.
        parser: Its options.
        measure: Makes the report.
        text: The report as lines.
        join_clients: See `Service`.
    """
    parser.add_argument("--model", type=Path, default=Path("runs/arithmetic/task-0/model"))
    parser.add_argument("--port", type=int, default=8765)
    args = parser.parse_args()
    sys.path.append(str(Path(sys.prefix) / "tinker"))  # where `make setup` puts the SDK
    os.environ["TINKER_TELEMETRY"] = "0"

    def measured() -> Report:
        if not (args.model / "config.json").is_file():
            raise ConfigError(f"{args.model} is no model.", part=name, hint="`make demo` makes one.")
        with tempfile.TemporaryDirectory(prefix="weightlane-service-") as directory:
            service = Service(args.model, Path(directory), args.port, join_clients=join_clients)
            try:
                service.start()
                return measure(service, args)
            finally:
                service.stop()

    code = 143  # of a signal
    try:
        code = finish(name, measured, text, args.json)
    finally:
        sys.stdout.flush()
        os._exit(code)  # the SDK's threads would go on calling


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""
