"""Train a tiny model on a CPU with one of TRL's trainers, unmodified, and record what its vLLM server says of every version.

    python train.py async|grpo --model DIR --server URL --out DIR --steps N [--kill PROCESS_GROUP VERSION]
    python train.py adapter|merged-adapter ...

``adapter`` trains an adapter with the asynchronous trainer, and TRL's own path hands it to the server: files, which vLLM loads.
``merged-adapter`` trains the same one, and weightlane sends the model into which TRL merges it.

The reward is the share of a completion's tokens in the lower half of the vocabulary. OUT gets the weights of every version, which
are the trainer's own model saved by transformers, and ``record.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from weightlane_trl import WeightlaneTransfer, use_weightlane

from weightlane.ckpt_engines import WeightlaneError

PROMPT = [5, 6, 7]
COUNT = 12


def low_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the reward of each completion; in a module of its own name, since TRL computes rewards in another process."""
    return [sum(token < 160 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def flash_attention_on_a_cpu() -> Any:
    """Stand in for the kernel that TRL's asynchronous trainer downloads, which runs on GPUs only: the same sums by torch."""

    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        begins_q: Any,
        begins_k: Any,
        *_: int,
        **settings: Any,
    ) -> torch.Tensor:
        assert settings["causal"], "TRL asks for causal attention"
        groups = query.shape[1] // key.shape[1]
        found = []
        for segment in range(len(begins_q) - 1):
            q = query[begins_q[segment] : begins_q[segment + 1]].transpose(0, 1)
            k, v = (
                each[begins_k[segment] : begins_k[segment + 1]].repeat_interleave(groups, 1).transpose(0, 1)
                for each in (key, value)
            )
            rows, columns = q.shape[1], k.shape[1]
            seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            scale = settings["softmax_scale"]
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
            found.append(attended.transpose(0, 1))
        return torch.cat(found)

    return SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


class Recorder(TrainerCallback):
    """Saves the weights of a version, and asks the server for its version and greedy tokens while that version serves."""

    def __init__(self, server: str, out: Path, kill: tuple[int, int] | None) -> None:
        self.server, self.out, self.kill = server, out, kill
        self.trainer: Any = None
        self.versions: list[dict[str, Any]] = []

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))

    def save(self) -> None:
        self.versions.append({"model": f"v{len(self.versions) + 1}"})
        model = self.trainer.model
        if hasattr(model, "merge_and_unload"):
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(self.out / self.versions[-1]["model"])

    def look(self) -> None:
        wanted = {"model": self.served(), "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        [choice] = self.ask("/v1/completions", {**wanted, "return_token_ids": True})["choices"]
        self.versions[-1] |= {"tokens": choice["token_ids"], **self.figures()}
        if self.kill is not None and len(self.versions) == self.kill[1]:
            os.killpg(self.kill[0], signal.SIGKILL)

    def served(self) -> str:
        """The name under which the server has the newest version."""
        return "tiny"

    def figures(self) -> dict[str, Any]:
        """The version that serves, how long the server paused for it, and how long it took."""
        report = self.transfer().report
        return {
            "served": self.ask("/weight_info")["weight_version"],
            "pause_s": report.rollout_blocked_s,
            "latency_s": report.latency_s,
        }

    def generated(self) -> float:
        """Tokens that the server has generated since it started, by vLLM's own metrics."""
        with urllib.request.urlopen(f"{self.server}/metrics") as answer:
            found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
        return sum(map(float, found))


class AfterEachStep(Recorder):
    """For the asynchronous trainer, whose own callbacks send a version when training begins and after every step."""

    def transfer(self) -> WeightlaneTransfer:
        return self.trainer.weight_transfer  # type: ignore[no-any-return]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.save()
        self.look()

    on_step_end = on_train_begin


class AfterEachAdapter(AfterEachStep):
    """For TRL's own path of adapters: the server pauses between two calls of TRL's client."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.paused: list[float] = []

    def follow(self, client: Any) -> None:
        """Note when `client` pauses its server and lets it go on."""
        for name in ("pause", "resume"):
            call = getattr(client, name)

            def noted(*args: Any, call: Any = call, first: bool = name == "pause") -> None:
                if first:
                    self.paused.append(-time.monotonic())
                call(*args)
                if not first:
                    self.paused[-1] += time.monotonic()

            setattr(client, name, noted)

    def served(self) -> str:
        return f"trl-policy-v{self.trainer.model_version}"

    def figures(self) -> dict[str, Any]:
        # The server pauses from TRL's call on, until the version serves.
        return {"served": str(self.trainer.model_version), "pause_s": self.paused[-1], "latency_s": self.paused[-1]}


class AroundEachStep(Recorder):
    """For the plain trainer, which sends a version in a step, before it generates."""

    def transfer(self) -> WeightlaneTransfer:
        return self.trainer.vllm_generation.vllm_client.transfer  # type: ignore[no-any-return]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.save()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.look()


def asynchronous(args: argparse.Namespace, settings: dict[str, Any]) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    # It has been written for GPUs alone: these two functions ask for one, the second only for a metric.
    packing._flash_attn = flash_attention_on_a_cpu
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.response_template = {  # TRL knows those of models that people use
        "defaults": {"role": "assistant"},
        "start_anchor": "",
        "fields": {"content": {"close_pattern": "w318", "content": "text"}},
    }
    adapter = None
    if args.trainer != "async":
        from peft import LoraConfig

        adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights="gaussian")
    return AsyncGRPOTrainer(
        model=str(args.model),
        peft_config=adapter,
        reward_funcs=low_tokens,
        train_dataset=prompts(),
        processing_class=tokenizer,
        args=AsyncGRPOConfig(
            vllm_server_base_url=args.server,
            token_budget=0,
            max_staleness=2,
            max_inflight_tasks=64,
            queue_maxsize=64,
            **settings,
        ),
        weight_transfer=None if args.trainer == "adapter" else WeightlaneTransfer(args.server),
    )


def plain(args: argparse.Namespace, settings: dict[str, Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    with use_weightlane():
        return GRPOTrainer(
            model=str(args.model),
            reward_funcs=low_tokens,
            train_dataset=prompts(),
            args=GRPOConfig(vllm_server_base_url=args.server, use_vllm=True, vllm_mode="server", beta=0.0, **settings),
        )


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{number}"}] for number in range(64)]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=["async", "grpo", "adapter", "merged-adapter"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--server")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kill", type=int, nargs=2, help="process group to kill, and the version after which")
    args = parser.parse_args()
    settings = {
        "output_dir": str(args.out),
        "max_steps": args.steps,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 0,
    }
    recorder = {"grpo": AroundEachStep, "adapter": AfterEachAdapter}.get(args.trainer, AfterEachStep)
    trainer = (plain if args.trainer == "grpo" else asynchronous)(args, settings)
    recording = recorder(args.server, args.out, args.kill)
    recording.trainer = trainer
    if isinstance(recording, AfterEachAdapter):
        recording.follow(trainer.vllm_client)
    trainer.add_callback(recording)
    error = None
    tokens, began = recording.generated(), time.monotonic()
    try:
        trainer.train()
    except WeightlaneError as raised:
        error = {"type": type(raised).__name__, "text": str(raised)}
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    record = {"versions": recording.versions, "rewards": rewards, "error": error}
    if error is None:
        record["tokens_per_s"] = (recording.generated() - tokens) / (time.monotonic() - began)
    (args.out / "record.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
