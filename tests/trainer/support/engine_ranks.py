"""Teams of processes with a training engine each, the tiny models they train, and what they hold put together."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from engine_batches import VOCAB
from fork_server import fork_python
from ports import free_port
from safetensors.torch import save_file
from tiny_models import load_tensors as checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from waiting import HANG_S

WORKER = Path(__file__).with_name("engine_worker.py")
LEARNING_RATE = 1e-3
TRAINER = {"learning_rate": LEARNING_RATE, "weight_decay": 0.01}


NEVER_TRAINED = "e_score_correction_bias"
"""How the tensors end that are part of a checkpoint and not of an optimizer; transformers keeps them in float32."""
FSDP2_TP2 = {"fsdp2": {"tensor_parallel": 2}}
FSDP2_CP2 = {"fsdp2": {"context_parallel": 2}}


def megatron(layout: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    return {"engine": "megatron", "megatron": layout, **trainer}


def case(*values: Any, id: str | None = None, marks: tuple[Any, ...] = ()) -> Any:  # noqa: A002 - pytest's name
    """A case of a test, with the marker ``megatron`` if one of `values` are settings of that engine."""
    needs = any(isinstance(each, dict) and each.get("engine") == "megatron" for each in values)
    return pytest.param(*values, id=id, marks=(*marks, pytest.mark.megatron) if needs else marks)


def exhaustive(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - pytest's name
    """A further case, which `make test` leaves out."""
    return case(*values, id=id, marks=(pytest.mark.exhaustive,))


class Ranks:
    """`world` processes of `engine_worker`, or of another program; `models` are tiny checkpoints by name."""

    def __init__(self, models: Mapping[str, Path], world: int, program: Path = WORKER) -> None:
        self._models = models
        port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._pipes, self._pids = [], []
        for rank in range(world):
            ours, theirs = Pipe()
            line = theirs.fileno()
            command = [str(program), *map(str, (line, rank, world, port))]
            self._pids.append(fork_python(command, environment, {number: number for number in (0, 1, 2, line)}))
            theirs.close()
            self._pipes.append(ours)

    def __len__(self) -> int:
        return len(self._pipes)

    def tell(self, rank: int, do: str, /, **arguments: Any) -> None:
        self._pipes[rank].send({"do": do, **arguments})

    def answer(self, rank: int) -> dict[str, Any]:
        pipe = self._pipes[rank]
        if not pipe.poll(HANG_S):
            for pid in self._pids:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(f"rank {rank} does not answer; where each rank is stands on stderr")
        try:
            return dict(pipe.recv())
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"rank {rank} has ended") from None

    def _answers(self, do: str, /, **arguments: Any) -> list[dict[str, Any]]:
        for rank in range(len(self)):
            self.tell(rank, do, **arguments)
        return [self.answer(rank) for rank in range(len(self))]

    def all(self, do: str, /, **arguments: Any) -> list[Any]:
        """Run a command on every rank; fails the test when a rank raises."""
        answers = self._answers(do, **arguments)
        assert not [answer for answer in answers if "error" in answer], answers
        return [answer["ok"] for answer in answers]

    def setup(self, model: str, **trainer: Any) -> None:
        """Let every rank load a model into a new engine."""
        self.all("setup", model=self._models[model], trainer={**TRAINER, **trainer})

    def all_fail(self, error: str, message: str, do: str, /, **arguments: Any) -> None:
        """Run a command that must raise `error` with `message` in its text on every rank."""
        for answer in self._answers(do, **arguments):
            assert answer.get("error") == error, answer
            assert message in answer["message"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill them all."""
        for pid, pipe in zip(self._pids, self._pipes, strict=True):
            os.kill(pid, signal.SIGKILL)  # one that has ended keeps its number until it is waited for
            os.waitpid(pid, 0)
            pipe.close()


class Teams:
    """Teams of ranks, and the tiny checkpoints by name that they train."""

    def __init__(self, models: Mapping[str, Path]) -> None:
        self.models = models
        self._shared: dict[int, Ranks] = {}

    def new(self, world: int) -> Ranks:
        """A team of a test's own."""
        return Ranks(self.models, world)

    def of(self, world: int) -> Ranks:
        """The team of so many ranks that tests share."""
        if world not in self._shared:
            self._shared[world] = self.new(world)
        return self._shared[world]

    def rest(self) -> None:
        """Let the teams that tests share close their engines."""
        for ranks in self._shared.values():
            ranks.all("close")

    def close(self) -> None:
        """End the teams that tests share; the next test starts others."""
        while self._shared:
            self._shared.popitem()[1].__exit__()


def make_models(root: Path) -> dict[str, Path]:
    """Tiny checkpoints: tied and untied, dense and with experts, one of them with a one-row parameter."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": 3,
        "initializer_range": 0.2,
    }
    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False, **sizes}
    latent = {
        **experts,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7}
    groups = {"n_group": 2, "topk_group": 1}
    configs = {
        "qwen3-tied": Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True),
        "qwen3-untied": Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False),
        "llama-untied": LlamaConfig(**sizes, tie_word_embeddings=False),
        "qwen2-moe": Qwen2MoeConfig(
            **experts, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=3
        ),
        "qwen3-moe": Qwen3MoeConfig(
            **experts, head_dim=8, moe_intermediate_size=12, num_experts=4, norm_topk_prob=True
        ),
        "deepseek-v2": DeepseekV2Config(
            **latent, q_lora_rank=None, rope_parameters={**yarn, "mscale_all_dim": 0.9}, routed_scaling_factor=1.5
        ),
        "deepseek-v3": DeepseekV3Config(**latent, **groups, q_lora_rank=6),
        "kimi-k2": DeepseekV3Config(
            **{**latent, "n_shared_experts": 1},
            q_lora_rank=6,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            rope_parameters={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
        ),
        "glm4-moe": Glm4MoeConfig(
            **{**latent, "num_key_value_heads": 2}, **groups, head_dim=8, use_qk_norm=True, attention_bias=True
        ),
        "glm4-moe-lite": Glm4MoeLiteConfig(**latent, q_lora_rank=6, rms_norm_eps=1e-3),
        "glm": GlmConfig(**sizes, head_dim=8, pad_token_id=None, attention_bias=False, tie_word_embeddings=True),
        "glm4": Glm4Config(**sizes, head_dim=8, pad_token_id=None),
        "gpt-oss": GptOssConfig(
            **experts,
            head_dim=8,
            num_local_experts=4,
            sliding_window=3,
            swiglu_limit=0.7,
            rope_parameters={**yarn, "rope_theta": 20.0, "original_max_position_embeddings": 64, "beta_fast": 4.0}
            | {"mscale": None, "truncate": False},
        ),
        "qwen3-next": Qwen3NextConfig(
            **experts,
            head_dim=8,
            partial_rotary_factor=0.5,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=10,
            num_experts=4,
            linear_key_head_dim=6,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            full_attention_interval=2,
        ),
        "qwen3-critic": Qwen3Config(**sizes, head_dim=8, num_labels=1),
        "gpt2": GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB, n_positions=32, eos_token_id=3, resid_pdrop=0.5
        ),
        "qwen2": Qwen2Config(**{**sizes, "vocab_size": VOCAB + 2}, tie_word_embeddings=True),  # its tokenizer adds one
    }
    vocabulary = {f"t{index}": index for index in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")), eos_token="t3"
    )
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        kind = AutoModelForTokenClassification if name.endswith("-critic") else AutoModelForCausalLM
        model = kind.from_config(config)
        for key, tensor in model.state_dict().items():
            if key.endswith("bias"):  # zeros choose nothing, and are the same wherever they are
                tensor.uniform_(0.1, 0.9)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in configs}


def whole(held: list[list[tuple[Any, ...]]]) -> dict[str, torch.Tensor]:
    """Tensors put together from the slices of every rank, each with its key, the tensor's shape, its place there, and its values.

    Elements that several ranks hold must be equal, one rank holds none twice, and none may be missing.
    """
    full: dict[str, torch.Tensor] = {}
    for slices in held:
        mine: dict[str, torch.Tensor] = {}
        for key, shape, starts, array in slices:
            target = full.setdefault(key, torch.full(shape, torch.nan))
            index = tuple(slice(start, start + size) for start, size in zip(starts, array.shape, strict=True))
            once = mine.setdefault(key, torch.zeros(shape))
            once[index] += 1
            assert not (once > 1).any(), f"a rank holds parts of {key} twice"
            data, known = torch.from_numpy(array), ~target[index].isnan()
            assert torch.equal(target[index][known], data[known]), f"two ranks differ about {key}"
            target[index] = data
    assert not [key for key, tensor in full.items() if tensor.isnan().any()]
    return full


def gathered(ranks: Ranks, wire_dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The full tensors that the ranks publish. Every rank lists the tensors that it lists in the same order."""
    held = ranks.all("shards", wire_dtype=wire_dtype)
    order = list(dict.fromkeys(name for name, *_ in held[0]))
    for slices in held:
        mine = dict.fromkeys(name for name, *_ in slices)
        assert [name for name in order if name in mine] == list(mine)
        for name, _, dtype, *_ in slices:
            assert dtype == ("torch.float32" if name.endswith(NEVER_TRAINED) else f"torch.{wire_dtype}")
    return whole([[(name, shape, starts, array) for name, shape, _, starts, array in slices] for slices in held])


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_fence_tells_of_changes(ranks: Ranks, names: Collection[str]) -> list[list[str]]:
    """One step that changes the checkpoint tensors `names`, and in which the fence names each of them once and before that.

    Returns what each call named.
    """
    reports = ranks.all("fence")
    order = [[call["named"] for call in report["calls"]] for report in reports]
    assert all(parts == order[0] for parts in order)
    named = [tensor for part in order[0] for tensor in part]
    assert sorted(named) == sorted(names)
    for report in reports:
        published = [tensor for tensor in report["published"] if tensor in named]
        assert published == [tensor for tensor in named if tensor in set(published)]
        assert report["changed"] == published
        may_change: set[str] = set()
        for call in report["calls"]:
            assert set(call["changed"]) == may_change & set(published)
            may_change |= set(call["named"])
        assert report["step"] == 1
    return order[0]


COMPUTED_TOKENS = {"read_tokens", "packed_tokens"}
"""Metrics of FSDP2 alone; how many tokens it computes depends on the layout."""
_alone: dict[str, list[dict[str, float]]] = {}
"""Reports of FSDP2 on one rank for each of `STEPS` steps, by model."""
STEPS = 3


def assert_steps_are_those_of_one_rank(teams: Teams, world: int, name: str, directory: Path, **trainer: Any) -> None:
    """Losses within 1e-4 of FSDP2's on the same data, in fp32; shards and exports that are the checkpoint, before and after."""
    if name not in _alone:
        alone = teams.of(1)
        alone.setup(name, micro_batch_tokens=40)
        (_alone[name],) = alone.all("train", first=0, count=STEPS)
    start, ranks = checkpoint(teams.models[name]), teams.of(world)
    ranks.setup(name, micro_batch_tokens=40, **trainer)
    assert_same(gathered(ranks, "bfloat16"), start)
    reports = ranks.all("train", first=0, count=STEPS)
    assert all(report == reports[0] for report in reports)
    layout = trainer.get("megatron", {})
    if world == layout.get("tensor_parallel", 1) * layout.get("pipeline_parallel", 1):  # one rank has all sequences
        shares = name != "qwen3-next"
        assert all((report["packed_tokens"] < report["read_tokens"]) is shares for report in reports[0])
    for mine, theirs in zip(reports[0], _alone[name], strict=True):
        assert mine.keys() - COMPUTED_TOKENS == theirs.keys() - COMPUTED_TOKENS
        for key in theirs.keys() - COMPUTED_TOKENS:
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4, rel=1e-4), key
    trained = gathered(ranks)
    assert [key for key, value in start.items() if torch.equal(trained[key], value)] == [
        key for key in start if key.endswith(NEVER_TRAINED)
    ]
    ranks.all("export", directory=directory / "exported")
    assert_same(checkpoint(directory / "exported"), trained)
    shutil.copytree(teams.models[name], directory / "ordinary")
    save_file(trained, directory / "ordinary" / "model.safetensors", {"format": "pt"})
    loaded = [AutoModelForCausalLM.from_pretrained(directory / each) for each in ("exported", "ordinary")]
    assert_same(*(model.state_dict() for model in loaded))


def assert_steps_are_torchs_and_a_saved_run_continues(teams: Teams, name: str, directory: Path, **trainer: Any) -> None:
    """Steps of two ranks are those of torch, rounded after each where they are held in fewer bits; a resumed run goes on so."""
    ranks, settings = teams.of(2), {"lr_warmup_steps": 2, **trainer}
    if trainer["optimizer"] == "adamw_8bit" and not Path(sys.prefix, "torchao").is_dir():
        pytest.skip("torchao is not installed")
    ranks.setup(name, **settings)
    assert ranks.all("train_beside_one_whole_step", count=3) == [[[]] * 3] * 2
    ranks.all("train", first=0, count=1, loss="headless")
    ranks.all("save", directory=directory / "state")
    trained = []
    for again in (False, True):
        if again:
            ranks.setup(name, **settings)
            assert ranks.all("load", directory=directory / "state") == [4, 4]
        trained.append((ranks.all("train", first=3, count=2), gathered(ranks)))
    assert trained[0][0] == trained[1][0]
    assert_same(trained[0][1], trained[1][1])
