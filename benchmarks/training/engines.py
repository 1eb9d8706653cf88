"""Costs of parts of training next to those of what they replace: a head over a large vocabulary, padding, passes, and loading.

    python -m benchmarks.training.engines [--parts head,packing,slots,loading] [--json FILE]

Each method runs in a process of its own, in turn with the others, so that its peak memory is its own. On a CPU, with one thread.
`cuda-head` measures the first part on a GPU, next to liger-kernel and cut-cross-entropy (which leaves out small gradients) where
they are installed. Memory is the peak above what was there before the first call.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Report, finish, options_of, table

TOKENS, WIDTH, VOCAB = 1024, 256, 151_936
CUDA_TOKENS, CUDA_WIDTH = 8192, 4096
CUDA_TOP = {"kernel": 0, "kernel, top 20": 20, "kernel, top 128": 128}
"""How many of the most probable tokens the kernel finds for each target."""
CUDA_PEERS = {"liger-kernel": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
"""Packages that compute a head without whole logits, too, by the names of their modules; measured where they are installed."""
ROUNDS = 3
_LONGEST_S = 600
SLOTS = 8
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
    command = [sys.executable, "-m", "benchmarks.training.engines", "--way"]
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


def head() -> list[dict[str, Any]]:
    """Target log-probabilities, forward and backward."""
    about = f"log-probabilities of {TOKENS} targets out of {VOCAB}"
    return [
        {"what": about, "method": "whole logits", "tokens": TOKENS, **_measured("whole-head")},
        {"what": about, "method": "in chunks", "tokens": TOKENS, **_measured("chunked-head")},
    ]


def cuda_head() -> list[dict[str, Any]]:
    """The head on a CUDA device, next to the kernels of others that are installed."""
    about = f"log-probabilities of {CUDA_TOKENS} targets, width {CUDA_WIDTH}, bfloat16"
    peers = [name for name, package in CUDA_PEERS.items() if importlib.util.find_spec(package)]
    return [
        {"what": about, "method": name, "tokens": CUDA_TOKENS, **_measured("cuda-head", name)}
        for name in ("whole logits", "in chunks", *CUDA_TOP, *peers)
    ]


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
    top_k = CUDA_TOP.get(way, 0)
    return lambda hidden, weight, targets: head_outputs(hidden, weight, targets, top_k=top_k).logprobs.sum()


def _step(path: str, settings: str) -> Callable[[], None]:
    """Forward and backward of an engine on one rank."""
    from weightlane.trainer import LossDenominators, TokenBatch, TokenSequence, TrainerConfig, sft
    from weightlane.trainer.engines.registry import training_engine_class

    torch.manual_seed(0)
    drawn = [torch.randint(1000, (length + 1,)) for length in LENGTHS]
    batch = TokenBatch(tuple(TokenSequence(tokens[:-1], tokens[1:]) for tokens in drawn))
    budget = len(LENGTHS) * max(LENGTHS)
    config = TrainerConfig(device="cpu", micro_batch_tokens=budget, **json.loads(settings))
    engine = training_engine_class(config.engine)(config, 0, 1, ("127.0.0.1", 0))
    engine.setup(Path(path), seed=0)
    denominators = LossDenominators.of(batch)
    return lambda: engine.forward_backward(batch, sft, denominators) and None


def packing() -> list[dict[str, Any]]:
    """Packed and padded micro-batches."""
    about = f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS)} tokens, forward and backward"
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "vocab_size": 1000}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), torch.float32, **sizes)
        return [
            {"what": about, "method": name, "tokens": sum(LENGTHS), **_measured("step", folder, settings)}
            for name, settings in (("padded", '{"fsdp2": {"packing": "off"}}'), ("packed", "{}"))
        ]


def _slots(path: str, tokens: str, way: str) -> Callable[[], None]:
    """Forward and backward of a program's rank on a sequence of each slot: all in one call, or a call for each."""
    from weightlane.trainer import LoraConfig, TrainerConfig
    from weightlane.trainer.user_program import ForwardInput, TrainerRank

    torch.manual_seed(0)
    rank, inputs = TrainerRank(path, TrainerConfig(device="cpu")), []
    for slot in map(str, range(SLOTS)):
        rank.load_checkpoint(slot, config=LoraConfig(rank=8))
        drawn = torch.randint(1000, (int(tokens) + 1,))
        inputs.append(ForwardInput(input_tokens=drawn[:-1], target_tokens=drawn[1:], checkpoint=slot))
    calls = [inputs] if way == "one pass" else [[each] for each in inputs]

    def run() -> None:
        for call in calls:
            outputs: Any = rank.dp_rank_forward(call)
            rank.backward(sum(output.target_logprobs.sum() for output in outputs))

    return run


def slots() -> list[dict[str, Any]]:
    """Several adapters in one pass over the model, and one after the other."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 1000}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), torch.float32, **sizes)
        return [
            {
                "what": f"{SLOTS} slots with {tokens} tokens each, forward and backward",
                "method": way,
                "tokens": SLOTS * tokens,
                **_measured("slots", folder, str(tokens), way),
            }
            for tokens in (16, 128)
            for way in ("one after another", "one pass")
        ]


def write_model(path: Path, dtype: torch.dtype, **sizes: int) -> None:
    """Write a Qwen3 of these sizes with random weights, and a tokenizer of two words."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    usual = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = transformers.Qwen3Config(**{**usual, **sizes})
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106 - a word
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(path)  # noqa: S106 - as above


def _load(path: str, rank: str, port: str, how: str) -> dict[str, float]:
    """Load as one of four ranks."""
    from weightlane.trainer import TrainerConfig
    from weightlane.trainer.engines.fsdp2 import engine as module
    from weightlane.trainer.engines.hf import checkpoint

    if how == "whole model":  # what every rank did before, and still does with older checkpoint formats
        checkpoint.stored_weights = lambda *_: None
    engine = module.Fsdp2Engine(TrainerConfig(device="cpu", ranks=4), int(rank), 4, ("127.0.0.1", int(port)))
    from transformers import AutoModelForCausalLM  # noqa: F401 - so that its import isn't measured

    found: dict[str, float] = {}
    optimizer = module.PartwiseOptimizer
    before, started = _peak_bytes(), time.perf_counter()

    def once_loaded(*args: Any, **settings: Any) -> Any:
        """Measure before AdamW's moments are there, which take twice the memory of the weights."""
        found.update(seconds=time.perf_counter() - started, bytes=float(_peak_bytes() - before))
        return optimizer(*args, **settings)

    module.PartwiseOptimizer = once_loaded
    engine.setup(Path(path), seed=0)
    found["share"] = float(sum(shard.data.nbytes for shard in engine.local_shards(torch.float32)))
    engine.close()
    return found


def loading() -> list[dict[str, Any]]:
    """A model on four ranks: the slowest rank, and the one with most memory above its share."""
    from weightlane.ckpt_engines.engines.torch_distributed.process_group import reserve_port

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), torch.bfloat16, **GIGABYTE_MODEL)  # as most are
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        about = f"loading {size / 1e9:.2f} GB of bfloat16 as float32 on four ranks, memory above a rank's share"
        for method in ("whole model", "own slices") * 2:  # the first time reads the file from disk
            with reserve_port("127.0.0.1") as reserved:
                port = str(reserved.getsockname()[1])
            answers = _answers([["load", folder, str(rank), port, method] for rank in range(4)])
            most = {key: max(answer[key] for answer in answers) for key in ("seconds", "bytes", "share")}
            found[method] = {"what": about, "method": method, **most, "bytes": most["bytes"] - most["share"]}
    return list(found.values())


WAYS: dict[str, Callable[..., dict[str, float]]] = {
    "whole-head": lambda: _repeated(_head(chunked=False)),
    "chunked-head": lambda: _repeated(_head(chunked=True)),
    "cuda-head": _cuda_head,
    "step": lambda path, settings: _repeated(_step(path, settings)),
    "slots": lambda *about: _repeated(_slots(*about)),
    "load": _load,
}
PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "head": head,
    "packing": packing,
    "slots": slots,
    "loading": loading,
    "cuda-head": cuda_head,
}


def text(report: Report) -> str:
    """The table; each part's first method is what it replaces."""
    rows: list[list[str]] = []
    first: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        before = first.setdefault(row["what"], row)
        speed = f"{row['tokens'] / row['seconds']:.0f}" if "tokens" in row else ""
        cells = (f"{row['seconds']:.3g}", f"{row['seconds'] / before['seconds']:.2f}", f"{row['bytes'] / 1e6:.0f}")
        rows.append([row["what"], row["method"], *cells, f"{row['bytes'] / before['bytes']:.2f}", speed])
    return table(("what", "method", "s", "of the first", "MB", "of the first", "tokens/s"), rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts that are asked for."""
    parser = options_of(__doc__)
    parser.add_argument("--parts", default="head,packing,slots,loading", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--way", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.way:  # a process of its own, for one method
        torch.set_num_threads(1)
        print(json.dumps(WAYS[asked.way[0]](*asked.way[1:])))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"

    def measured() -> Report:
        return {"rows": [row for part in asked.parts.split(",") for row in PARTS[part]()], "verified": True}

    return finish("training", measured, text, asked.json, "cuda" if "cuda" in asked.parts else "cpu")


if __name__ == "__main__":
    sys.exit(main())
