"""A vLLM OpenAI server as vLLM's documentation starts it, and what a client can ask it. Nothing of ours runs around it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waiting import HANG_S, wait_until

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class StockServer:
    """A server process; `wait_ready` before the first request."""

    def __init__(self, children: Any, model: Path, port: int, tensor_parallel: int, log: Path) -> None:
        self.model, self.port, self.tensor_parallel, self.log = model, port, tensor_parallel, log
        self.fresh: dict[str, str] = {}
        """The checksums before the first version."""
        arguments = [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(tensor_parallel)),
            *("--weight-transfer-config", '{"backend": "weightlane"}'),
            *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(64 << 20)),
        ]
        with log.open("w") as file:
            self.process = children.start(
                arguments, forked=True, env=_ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        wait_until(self._healthy, f"server: see {self.log}", poll_s=0.2)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        with contextlib.suppress(OSError):
            return self.ask("GET", "/health")[0] == 200
        return False

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status, and an answer that is parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """One greedy completion over the OpenAI API."""
        wanted = {"model": "tiny", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        status, answer = self.ask("POST", "/v1/completions", {**wanted, "return_token_ids": True})
        assert status == 200, answer
        return dict(answer["choices"][0])

    def greedy(self, prompt: Sequence[int], count: int = 16) -> list[int]:
        """Token ids of a greedy completion."""
        return list(self.complete(prompt, count)["token_ids"])

    def running(self) -> bool:
        """Whether requests are being decoded, by vLLM's own metrics."""
        _, text = self.ask("GET", "/metrics")
        counts = [line.split()[-1] for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return any(float(count) > 0 for count in counts)

    def checksums(self) -> dict[str, str]:
        """vLLM's own checksums over the parameters; before 0.32, which has none, tokens that they generate."""
        status, answer = self.ask("POST", "/weight_checker", {"action": "checksum"})
        if status == 404:
            return {"greedy": str([self.greedy([token], 24) for token in (4, 5, 6)])}
        assert status == 200, answer
        return dict(answer["checksums"])

    def version(self) -> str:
        return str(self.ask("GET", "/weight_info")[1]["weight_version"])
