"""The cost of training beside the ways that it replaces: log-probabilities over a large vocabulary, padding, and loading.

    python -m benchmarks.training [--parts head,packing,loading] [--json FILE]

Each way runs in a process of its own, in turn with the others, so that its peak memory is its own. On a CPU, with one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TOKENS, WIDTH, VOCAB = 1024, 256, 151_936
CUDA_TOKENS, CUDA_WIDTH = 8192, 4096
CUDA_PEERS = {"liger-kernel": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
"""Packages that compute a head without whole logits, too, by the names of their modules; measured where they are installed."""
ROUNDS = 3
_LONGEST_S = 600
LENGTHS = (32, 64, 96, 128, 160, 192, 224, 256) * 2
"""Sequences whose lengths are one to eight."""
GIGABYTE_MODEL = {"hidden_size": 1536, "num_hidden_layers": 8, "intermediate_size": 4608, "vocab_size": 32_000}
"""About a gigabyte in float32, in which it is trained."""


def _measured(way: str, *args: str) -> dict[str, float]:
    """Median seconds and peak memory in bytes of a way, which is called once to warm up, in a process of its own."""
    (found,) = _answers([[way, *args]])
    return found


def _answers(ways: Sequence[Sequence[str]]) -> list[dict[str, float]]:
    """The figures of ways that run at the same time, each in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", "--way"]
    processes = [subprocess.Popen([*command, *way], stdout=subprocess.PIPE) for way in ways]  # noqa: S603 - this module
    try:
        outputs = [process.communicate(timeout=_LONGEST_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [dict(json.loads(output.splitlines()[-1])) for output in outputs]


def _repeated(run: Callable[[], None]) -> dict[str, float]:
    before = _peak_bytes()
    seconds = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return {"seconds": statistics.median(seconds[1:]), "bytes": float(_peak_bytes() - before)}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()  # getrusage would count what the process was forked from
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _head(*, chunked: bool) -> Callable[[], None]:
    """Forward and backward of target log-probabilities from hidden states, in chunks or by whole logits."""
    from weightlane.trainer.engines.head import head_outputs

    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    targets = torch.randint(VOCAB, (TOKENS,))

    def run() -> None:
        if chunked:
            logprobs = head_outputs(hidden, weight, targets).logprobs
        else:
            logits = torch.nn.functional.linear(hidden, weight).float()
            logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
        logprobs.sum().backward()
        hidden.grad = weight.grad = None

    return run


def head() -> dict[str, Any]:
    """Target log-probabilities, forward and backward."""
    whole, chunked = _measured("whole-head"), _measured("chunked-head")
    print(f"log-probabilities of {TOKENS} targets out of {VOCAB} tokens, width {WIDTH}, forward and backward")
    _print_rows({"whole logits": whole, "in chunks": chunked})
    print(f"  memory {chunked['bytes'] / whole['bytes']:.2f} x, time {chunked['seconds'] / whole['seconds']:.2f} x\n")
    return {"whole": whole, "chunked": chunked}


def cuda_head() -> dict[str, Any]:
    """The head on a CUDA device, beside the kernels of others that are installed."""
    peers = [name for name, package in CUDA_PEERS.items() if importlib.util.find_spec(package)]
    found = {name: _measured("cuda-head", name) for name in ("whole logits", "in chunks", "kernel", *peers)}
    print(f"{CUDA_TOKENS} targets, width {CUDA_WIDTH}, bfloat16, {torch.cuda.get_device_name()}, forward and backward")
    _print_rows(found, CUDA_TOKENS)
    missing = [name for name in CUDA_PEERS if name not in peers]
    print(f"  not installed: {', '.join(missing)}\n" if missing else "")
    return found


def _cuda_head(way: str) -> dict[str, float]:
    """Seconds of forward and backward of summed log-probabilities, and peak bytes beside hidden states and weight."""
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(rows, CUDA_WIDTH, device="cuda", dtype=torch.bfloat16).mul_(CUDA_WIDTH**-0.25).requires_grad_()
        for rows in (CUDA_TOKENS, VOCAB)
    )
    targets = torch.randint(VOCAB, (CUDA_TOKENS,), device="cuda")
    total = _cuda_way(way)
    resident, seconds = torch.cuda.memory_allocated(), []
    for round_number in range(ROUNDS + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        total(hidden, weight, targets).backward()
        torch.cuda.synchronize()
        if round_number:  # the first compiles
            seconds.append(time.perf_counter() - started)
        hidden.grad = weight.grad = None
    peak = torch.cuda.max_memory_allocated() - resident
    return {"seconds": statistics.median(seconds), "bytes": float(peak)}


def _cuda_way(way: str) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The function from hidden states, weight and targets to the sum of log-probabilities, or of their negatives."""
    from weightlane.trainer.engines.head import head_outputs, outputs

    if way == "liger-kernel":
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return lambda hidden, weight, targets: liger(weight, hidden, targets)
    if way == "cut-cross-entropy":
        from cut_cross_entropy import linear_cross_entropy

        return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, reduction="sum")
    if way == "whole logits":
        return lambda hidden, weight, targets: torch.nn.functional.cross_entropy(
            torch.nn.functional.linear(hidden, weight).float(), targets, reduction="sum"
        )
    if way == "in chunks":
        outputs._by_kernels = lambda _: False
    elif not outputs._by_kernels(torch.empty(0, device="cuda", dtype=torch.bfloat16)):
        raise SystemExit("triton is not installed: the kernel cannot be measured.")
    return lambda hidden, weight, targets: head_outputs(hidden, weight, targets).logprobs.sum()


def _step(path: str, packing: str) -> Callable[[], None]:
    """Forward and backward of the fsdp2 engine on one rank."""
    from weightlane.trainer import LossDenominators, TokenBatch, TokenSequence, TrainerConfig, sft
    from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine

    torch.manual_seed(0)
    drawn = [torch.randint(1000, (length + 1,)) for length in LENGTHS]
    batch = TokenBatch(tuple(TokenSequence(tokens[:-1], tokens[1:]) for tokens in drawn))
    budget = len(LENGTHS) * max(LENGTHS)
    config = TrainerConfig(device="cpu", micro_batch_tokens=budget, fsdp2={"packing": packing})
    engine = Fsdp2Engine(config, 0, 1, ("127.0.0.1", 0))
    engine.setup(Path(path), seed=0)
    denominators = LossDenominators.of(batch)
    return lambda: engine.forward_backward(batch, sft, denominators) and None


def packing() -> dict[str, Any]:
    """Tokens per second of packed and of padded micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        _write_model(
            Path(folder), torch.float32, hidden_size=256, num_hidden_layers=4, intermediate_size=768, vocab_size=1000
        )
        padded, packed = _measured("step", folder, "off"), _measured("step", folder, "auto")
    tokens = sum(LENGTHS)
    print(f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, forward and backward, fsdp2")
    _print_rows({"padded": padded, "packed": packed}, tokens)
    print(f"  tokens per second {padded['seconds'] / packed['seconds']:.2f} x\n")
    return {"padded": padded, "packed": packed, "tokens": tokens}


def _print_rows(rows: Mapping[str, Mapping[str, float]], tokens: int = 0) -> None:
    for name, row in rows.items():
        speed = f"  {tokens / row['seconds']:8.0f} tokens/s" if tokens else ""
        print(f"  {name:14} {row['seconds']:7.2f} s  {row['bytes'] / 1e6:7.0f} MB{speed}")


def _write_model(path: Path, dtype: torch.dtype, **sizes: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    config = Qwen3Config(
        **sizes, num_attention_heads=8, num_key_value_heads=4, head_dim=64, eos_token_id=1, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106 - a word
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(path)  # noqa: S106 - as above


def _load(path: str, rank: str, port: str, how: str) -> dict[str, float]:
    """Load as one of four ranks."""
    from weightlane.trainer import TrainerConfig
    from weightlane.trainer.engines.fsdp2 import engine as module

    if how == "whole model":  # what every rank did before, and still does with older checkpoint formats
        module.can_read_slices = lambda *_: False
    engine = module.Fsdp2Engine(TrainerConfig(device="cpu", ranks=4), int(rank), 4, ("127.0.0.1", int(port)))
    from transformers import AutoModelForCausalLM  # noqa: F401 - so that its import isn't measured

    found: dict[str, float] = {}
    optimizer = module.PartwiseAdamW
    before, started = _peak_bytes(), time.perf_counter()

    def once_loaded(*args: Any, **settings: Any) -> Any:
        """Measure before AdamW's moments are there, which take twice the memory of the weights."""
        found.update(seconds=time.perf_counter() - started, bytes=float(_peak_bytes() - before))
        return optimizer(*args, **settings)

    module.PartwiseAdamW = once_loaded
    engine.setup(Path(path), seed=0)
    found["share"] = float(sum(shard.data.nbytes for shard in engine.local_shards(torch.float32)))
    engine.close()
    return found


def loading() -> dict[str, Any]:
    """Time and peak memory of loading a model on four ranks."""
    from weightlane.ckpt_engines.engines.torch_distributed.tcp_store import reserve_port

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), torch.bfloat16, **GIGABYTE_MODEL)  # as most are
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        for how in ("whole model", "own slices") * 2:  # the first time reads the file from disk
            with reserve_port("127.0.0.1") as reserved:
                port = str(reserved.getsockname()[1])
            answers = _answers([["load", folder, str(rank), port, how] for rank in range(4)])
            found[how] = {key: max(answer[key] for answer in answers) for key in answers[0]}
    print(f"loading {size / 1e9:.2f} GB of bfloat16 on four ranks: the slowest rank, and the one with most memory")
    _print_rows(found)
    share = found["own slices"]["share"]
    print(f"  a rank's share is {share / 1e6:.0f} MB\n")
    return {"bytes": size, **found}


WAYS: dict[str, Callable[..., dict[str, float]]] = {
    "whole-head": lambda: _repeated(_head(chunked=False)),
    "chunked-head": lambda: _repeated(_head(chunked=True)),
    "cuda-head": _cuda_head,
    "step": lambda path, packing: _repeated(_step(path, packing)),
    "load": _load,
}
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "head": head,
    "packing": packing,
    "loading": loading,
    "cuda-head": cuda_head,
}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="head,packing,loading", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--way", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:  # a process of its own, for one way
        torch.set_num_threads(1)
        print(json.dumps(WAYS[asked.way[0]](*asked.way[1:])))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    results = {part: PARTS[part]() for part in asked.parts.split(",")}
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
