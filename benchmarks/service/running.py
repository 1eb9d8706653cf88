"""A running `weightlane tinker` for a benchmark that drives it by the public Tinker SDK."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from weightlane.ckpt_engines import WeightlaneError

START_S, CALL_S = 300.0, 600.0
"""Longest start of the service, and longest single call of a client."""
RANK, TOKENS = 8, 12
"""Rank of a client's adapter; tokens of a sequence, prompt and completion, as in the demo."""
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


def take_step(training: Any, seed: int, batch: int, rate: float) -> None:
    """One optimizer step of a client, on a batch of random sequences that `seed` decides."""
    from tinker import types

    draws = random.Random(seed)
    rows = [[draws.randrange(3, 13) for _ in range(TOKENS)] for _ in range(batch)]
    data = [types.Datum(types.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in rows]
    training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)).result(CALL_S)


def saved_tensors(service: Service, training: Any) -> dict[str, torch.Tensor]:
    """A client's adapter, by PEFT's names."""
    path = training.save_state("compared", overwrite=True).result(CALL_S).path
    model, _, name = path.removeprefix("tinker://").split("/")
    (directory,) = (service.files / "checkpoints" / model.replace(":", ".") / "weights").glob(f"{name}~*")
    return load_file(directory / "adapter_model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of all differences as a part of that of `other`'s tensors: 0 where they are bit for bit the same."""
    if one.keys() != other.keys():
        return float("inf")
    if all(torch.equal(one[name], other[name]) for name in one):
        return 0.0
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in other)
    return float((difference / sum(float(each.double().square().sum()) for each in other.values())) ** 0.5)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""
