"""Carries versions of real models into stock vLLM servers on GPUs, with CUDA graphs, and looks at what they generate.

    python -m benchmarks.gpu.vllm_server [--tp 1] [--engine cuda_ipc] [--json FILE] MODEL...

MODEL is a directory with safetensors files, as a Hugging Face cache has them. For each: a server starts with the model's own
weights and answers some prompts; it gets the same weights as a version, then others (every matrix a little smaller), then the
first again. Its answers must be the same, others, and the same. The trainer's process has the weights on GPU 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from weightlane.rollout import ServerReplica
from weightlane.sync import CollectivePublisher, LocalShard, SyncConfig, TensorSpec

from .models import name_of

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "2 + 2 =")
TOKENS = 24
_START_S, _ANSWER_S, _END_S = 300.0, 60.0, 30.0
_SHARE_OF_GPU = 0.5
"""Share of GPU memory that vLLM takes; the trainer's weights and its versions are in the rest (`models.SHARE_OF_MEMORY`)."""
_SMALLER = 0.9


@contextlib.contextmanager
def server(model: Path, ranks: int) -> Iterator[str]:
    """Run a vLLM server of `model` on `ranks` GPUs, and yield its URL. It ends with the block, with all its processes."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name=m"),
        *("--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", str(ranks), "--max-model-len", "1024"),
        *("--gpu-memory-utilization", str(_SHARE_OF_GPU), "--weight-transfer-config", '{"backend": "weightlane"}'),
    ]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)  # noqa: S603
        try:
            _wait_for(url, child, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _wait_for(url: str, child: subprocess.Popen[bytes], log: Any) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and child.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - loopback
            return
        time.sleep(1.0)
    log.seek(0)
    sys.stderr.write(log.read()[-5000:].decode(errors="replace"))
    raise RuntimeError(
        f"vLLM ended with {child.returncode}" if child.poll() is not None else "vLLM did not start in time"
    )


def answers(url: str) -> list[str]:
    """The server's completions of `PROMPTS`, decoded greedily one after the other."""
    said = []
    for prompt in PROMPTS:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310 - loopback
            said.append(json.load(answer)["choices"][0]["text"])
    return said


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """The model's tensors on GPU 0."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cuda:0") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
    return found


def measure(model: Path, ranks: int, engine: str) -> dict[str, Any]:
    """Figures of one model. Raises RuntimeError when the server says what it should not."""
    with server(model, ranks) as url:
        own = answers(url)
        live = weights_of(model)
        shards = [LocalShard.whole(TensorSpec(name, tuple(w.shape), w.dtype), w) for name, w in live.items()]
        replica = ServerReplica(url, tensor_parallel=ranks, connect_timeout_s=_START_S)
        config = SyncConfig(deadline_s=120.0)
        seconds: list[float] = []
        blocked: list[float] = []
        with CollectivePublisher(shards, [replica], backend=engine, config=config) as publisher:

            def publish(version: int) -> list[str]:
                started = time.perf_counter()
                publisher.publish(version)
                publisher.fence()
                report = publisher.wait()
                assert report is not None
                seconds.append(time.perf_counter() - started)
                blocked.append(report.rollout_blocked_s)
                return answers(url)

            same = publish(1)
            matrices = [tensor for tensor in live.values() if tensor.dim() > 1]
            before = [tensor.cpu() for tensor in matrices]  # the GPU has no room for another copy
            torch._foreach_mul_(matrices, _SMALLER)
            other = publish(2)
            for tensor, values in zip(matrices, before, strict=True):
                tensor.copy_(values)
            again = publish(3)
    for what, right in (
        ("the same weights made it say something else", same == own),
        ("other weights made no difference", other != own),
        ("with the first weights back it says something else", again == own),
    ):
        if not right:
            raise RuntimeError(f"{what}: {own} {same} {other} {again}")
    nbytes = sum(tensor.nbytes for tensor in live.values())
    return {
        "GB": nbytes / 1e9,
        "version, ms": 1e3 * seconds[-1],
        "rollout blocked, ms": 1e3 * blocked[-1],
        "GB/s": nbytes / seconds[-1] / 1e9,
    }


def main() -> int:
    """Measure every model, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--engine", default="cuda_ipc")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for model in options.models:
        found = measure(model, options.tp, options.engine)
        figures |= {f"{name_of(model)}: {what}": value for what, value in found.items()}
        if options.json is not None:  # what was found stays when a later model fails
            options.json.write_text(json.dumps({"figures": figures}) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
