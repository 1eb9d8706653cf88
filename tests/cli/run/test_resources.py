"""A run derives its resources from the model and the machine, and refuses a run that does not fit before it starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import assert_refused, run
from tiny_run import Material
from transformers import MambaConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.commands.prediction import Gpu, ModelCost, gpus_named, predicted
from weightlane.cli.config.run_config import RunConfig, load_config
from weightlane.cli.fleet.room import check_replicas
from weightlane.cli.run import resources
from weightlane.cli.run.resources import Machines, Sizes, described, fitted, fitted_trainer, reserved_cpus
from weightlane.rollout.layout.offline.needs_cache import CACHE_ENV
from weightlane.rollout.replicas.ray_actor import SharedDevices
from weightlane.trainer.engines.hf.model_dir import ModelInfo

ROOT = Path(__file__).parents[3]
GB = 10**9
H100 = 80 * GB


@pytest.fixture(autouse=True)
def vllm_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "vllm_is_for_cpus", lambda: False)


def configured(**sections: Any) -> RunConfig:
    required = {
        "run": {"dir": "d"},
        "model": {"path": "m"},
        "data": {"train": "t", "heldout": "h"},
        "reward": {"function": "m:f"},
        "checkpoint_engine": {"backend": "nccl"},
    }
    return RunConfig.model_validate({**required, **sections})


def sized(billions: float, config: RunConfig) -> Sizes:
    parameters = int(billions * GB)
    tensor_parallel, ranks = config.rollout.tensor_parallel, config.trainer.ranks
    share = 2 * parameters // tensor_parallel
    return Sizes(parameters, 2 * parameters, share, share, 16 * parameters // ranks)


def test_a_model_of_seven_billion_goes_over_nccl_to_a_gpu_of_its_own_as_it_comes() -> None:
    config = configured(trainer={"ranks": 4})
    fit = fitted(config, sized(7, config), Machines(8, H100))
    assert (fit.trainer.gpus_per_rank, fit.rollout.gpus_per_rank) == (1.0, 1.0)
    limit, share = fit.rollout.staging_limit_bytes, fit.rollout.gpu_memory_utilization
    assert limit is not None
    assert share is not None
    assert limit >= 2 * 14 * GB, "the version that serves is kept"
    assert limit + share * H100 < H100
    assert share * H100 > 14 * GB
    assert fit.rollout.start_limit_s > 300 + 14 * 20
    text = dict(described(fit, sized(7, config), Machines(8, H100)))
    assert text["machine"] == "8 GPUs of 80 GB"
    assert text["model"] == "7 billion parameters, 14 GB a version"
    assert "28 GB each" in text["trainer"]


def test_memory_and_time_on_gpus_that_are_not_here_follow_from_the_models_shape() -> None:
    machines, gpu = gpus_named("8xH100")
    sections: dict[str, Any] = {
        "trainer": {"ranks": 4, "micro_batch_tokens": 16384, "activation_checkpointing": True},
        "rollout": {"replicas": 4, "max_num_seqs": 256, "concurrency": 256, "dtype": "bfloat16"},
        "algorithm": {"group_size": 8, "prompts_per_step": 128, "max_new_tokens": 1000},
    }
    shape = {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    plain = ModelCost.of(Qwen3Config(**shape), {"w": 4 * GB})

    def rows(model: ModelCost = plain, gpu: Gpu = gpu, **more: dict[str, Any]) -> dict[str, str]:
        config = configured(**{name: sections.get(name, {}) | more.get(name, {}) for name in sections | more})
        sizes = sized(4, config)
        return predicted(fitted(config, sizes, machines), model, "bfloat16", sizes, gpu, prompt_tokens=100.0)

    # Worked out by hand. State: 16 bytes x 4e9 / 4. Activations: an input of each layer, and 22,528 features of one.
    assert "state 16.0, activations of 16384 tokens 6.7, snapshot 2.0" in rows()["memory of a rank of trainer"]
    # Training: 8 operations x 4e9 x (1024 x 1000 + 128 x 100) tokens on 4 GPUs. Decoding: 1,000 times 8e9 bytes of weights and
    # 256 caches of 147,456 bytes x 600 tokens, at 60 % of 3,350 GB/s.
    assert rows()["time of a step"] == "24 s: generation 15 s, training 24 s, at the same time"
    assert rows()["time of the run"].startswith("40 min for 100 steps")
    assert rows(loop={"max_staleness": 0})["time of a step"].startswith("39 s")
    assert "training 18 s" in rows(trainer={"lora": {}})["time of a step"], "6 of 8 operations"
    assert "12 requests at once" in rows(rollout={"kv_cache_memory_bytes": 1 << 30})["memory of a rollout rank"]
    megatron = {"engine": "megatron", "megatron": {"tensor_parallel": 2}}
    assert "state 32.0" in rows(trainer=megatron)["memory of a rank of trainer"], "two copies"
    distributed = {"engine": "megatron", "megatron": {"tensor_parallel": 2, "distributed_optimizer": True}}
    assert "state 20.0" in rows(trainer=distributed)["memory of a rank of trainer"], "4 of 16 bytes twice"
    experts = Qwen3MoeConfig(**shape, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1024)
    mixture = ModelCost.of(experts, {"w": 2 * GB, "layers.0.mlp.experts.0.up_proj.weight": 2 * GB})
    assert "training 15 s" in rows(mixture)["time of a step"], "of 2e9 parameters in experts, a quarter"
    for refused, why in (
        (lambda: rows(gpu=gpus_named("8xrtx4090")[1]), r"a rank of trainer needs about 26\.9 GB"),
        (lambda: rows(trainer={"device": "cpu"}), "trainer and rollouts on GPUs"),
        (lambda: ModelCost.of(MambaConfig(), {}), "not predicted for mamba"),
    ):
        with pytest.raises(ConfigError, match=why):
            refused()


@pytest.mark.parametrize(
    ("recipe", "on", "column", "hidden", "intermediate", "layers", "heads"),
    [
        ("qwen3-0.6b-one-gpu", "1xh100", 1, 1024, 3072, 28, 16),
        ("qwen3-4b-one-node", "8xh100", 2, 2560, 9728, 36, 32),
    ],
)
def test_the_page_of_recipes_has_what_is_predicted_for_them(
    recipe: str, on: str, column: int, hidden: int, intermediate: int, layers: int, heads: int
) -> None:
    shape = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        elements = {name: each.numel() for name, each in Qwen3ForCausalLM(shape).named_parameters()}
    config = load_config(ROOT / "examples" / "gsm8k" / f"{recipe}.toml", runs_here=False)
    sizes, (machines, gpu) = sized(sum(elements.values()) / GB, config), gpus_named(on)
    found = predicted(
        fitted(config, sizes, machines), ModelCost.of(shape, elements), "bfloat16", sizes, gpu, prompt_tokens=100.0
    )
    page = (ROOT / "docs" / "guides" / "recipes.md").read_text()
    told = [line.split("|")[column + 1].strip() for line in page.splitlines() if re.match(r"\| (memory|time) of", line)]
    assert told == list(found.values())[:-1]


def test_each_role_counts_what_it_trains_and_roles_add_up_unless_they_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resources, "weight_elements", lambda path: 7 * GB)
    model = ModelInfo(Path(), {}, "Qwen3ForCausalLM", 1, eos_token_ids=(), dtype="bfloat16")
    trained = [Sizes.of(configured(trainer={"ranks": 4, **lora}), model).trained for lora in ({}, {"lora": {}})]
    assert trained == [28 * GB, 14 * GB], "the weights under an adapter have neither gradients nor moments"
    ppo = {"objective": "ppo", "kl_coefficient": 0.1}
    both = [{"trainer": {"ranks": 4}}, {"trainer": {"ranks": 4, "offload_roles": True}}]
    trained = [Sizes.of(configured(algorithm=ppo, **turns), model).trained for turns in both]
    assert trained == [2.25 * 28 * GB, 28 * GB], "a critic as large as the policy, weights of a reference"
    apart = configured(algorithm=ppo, trainer={"ranks": 4}, critic={"ranks": 2}, reference={"ranks": 1})
    sizes = Sizes.of(apart, model)
    assert (sizes.trained, sizes.own) == (28 * GB, {"critic": 56 * GB, "reference": 28 * GB})
    one_apart = Sizes.of(configured(algorithm=ppo, trainer={"ranks": 4}, critic={"ranks": 4}), model)
    assert (one_apart.trained, one_apart.own) == (1.25 * 28 * GB, {"critic": 28 * GB})
    fit = fitted(apart, sizes, Machines(8, H100))
    rows = dict(described(fit, sizes, Machines(8, H100)))
    assert list(rows)[2:6] == ["trainer", "critic", "reference", "rollout"]
    assert rows["critic"].startswith("2 ranks x 1 GPUs, 56 GB each")
    assert reserved_cpus(apart) == 7 * apart.trainer.cpus_per_rank + apart.rollout.cpus_per_rank
    with pytest.raises(
        ConfigError, match=r"4 trainer, 2 critic, 1 reference ranks x 1 and 1 rollout .* need 8 .*critic\.ranks"
    ):
        fitted(apart, sizes, Machines(7, H100))
    halves = configured(algorithm=ppo, trainer={"gpus_per_rank": 0.5}, critic={"ranks": 2})
    with pytest.raises(ConfigError, match=r"2 critic ranks of 0\.5 .*Lower critic\.ranks to 1"):
        fitted(halves, sizes, Machines(8, H100))
    with pytest.raises(
        ConfigError, match=r"4 trainer, 2 critic, 1 reference ranks x 1 GPUs need 7 GPUs, but there are 6"
    ):
        fitted_trainer(apart.trainer, Machines(6, H100), apart.rank_groups)


def test_rollouts_that_take_turns_with_the_trainer_need_no_gpus_of_their_own() -> None:
    turns = {
        "trainer": {"ranks": 4, "colocate": True},
        "rollout": {"tensor_parallel": 2, "replicas": 2, "commit": "in_place"},
    }
    config = configured(**turns)
    fit = fitted(config, sized(14, config), Machines(4, H100))
    assert (fit.trainer.gpus_per_rank, fit.rollout.gpus_per_rank) == (1.0, 1.0)
    with pytest.raises(ConfigError, match="4 trainer ranks x 1 and 0 rollout ranks"):
        fitted(config, sized(14, config), Machines(3, H100))
    more = configured(**turns | {"rollout": turns["rollout"] | {"replicas": 3}})
    with pytest.raises(ConfigError, match="6 rollout ranks would share the GPUs of 4 trainer ranks"):
        fitted(more, sized(14, more), Machines(8, H100))
    devices = [("node-a", "0"), ("node-a", "1"), ("node-b", "0"), ("node-b", "1")]
    first, second = SharedDevices.of(devices, config.rollout)
    assert (first.node_id, first.environment["CUDA_VISIBLE_DEVICES"]) == ("node-a", "0,1")
    assert second == SharedDevices("node-b", "0,1")
    assert SharedDevices.of([("node-a", "")], config.rollout)[1].environment == {}, "on a CPU"
    with pytest.raises(ConfigError, match=r"replica 1 has 2 ranks, and .* on several nodes"):
        SharedDevices.of([*devices[:2], devices[0], devices[3]], config.rollout)


def test_where_there_is_no_room_for_two_versions_there_is_for_one_and_what_does_not_fit_is_refused() -> None:
    config = configured()
    one = fitted(config, sized(14, config), Machines(2, H100)).rollout.staging_limit_bytes
    assert one is not None
    assert 28 * GB < one < 2 * 28 * GB
    with pytest.raises(ConfigError, match=r"64\.0 GB of the model.*exceeds the 80 GB of a GPU") as caught:
        fitted(config, sized(32, config), Machines(2, H100))
    assert "in_place" in caught.value.hint
    in_place = configured(rollout={"commit": "in_place"})
    assert fitted(in_place, sized(32, in_place), Machines(2, H100)).rollout.staging_limit_bytes == 2 * 32 << 20
    small = configured(rollout={"commit": "in_place", "staging_limit_bytes": 32 << 20 >> 1})
    with pytest.raises(ConfigError, match="16777216, and versions are written in place from buckets of 33554432 bytes"):
        fitted(small, sized(32, small), Machines(2, H100))
    through_host = configured(checkpoint_engine={"backend": "gloo"})
    assert fitted(through_host, sized(32, through_host), Machines(2, H100)).rollout.gpu_memory_utilization == 0.9


def test_ranks_that_no_gpu_is_left_for_are_refused_before_ray_waits_for_one() -> None:
    config = configured(trainer={"ranks": 4}, rollout={"replicas": 2, "tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"4 trainer ranks x 1 and 4 rollout ranks x 1 GPUs need 8 GPUs"):
        fitted(config, sized(1, config), Machines(4, H100))
    half: Any = {"gpus_per_rank": 0.5}
    shared = configured(trainer={"ranks": 1, **half}, rollout={**half, "gpu_memory_utilization": 0.4})
    fit = fitted(shared, sized(1, shared), Machines(1, H100))
    assert (fit.trainer.gpus_per_rank, fit.rollout.gpu_memory_utilization) == (0.5, 0.4)
    two = configured(trainer={"ranks": 2, **half})
    with pytest.raises(ConfigError, match="NCCL refuses ranks that share a GPU"):
        fitted(two, sized(1, two), Machines(4, H100))


def test_without_a_gpu_nothing_asks_for_one_and_what_was_set_stays() -> None:
    config = configured(rollout={"staging_limit_bytes": 5, "start_timeout_s": 7.0})
    fit = fitted(config, sized(1, config), Machines(0))
    assert (fit.trainer.gpus_per_rank, fit.rollout.gpus_per_rank) == (0.0, 0.0)
    assert (fit.rollout.staging_limit_bytes, fit.rollout.start_limit_s) == (5, 7.0)
    on_cpu = configured(trainer={"device": "cpu"})
    assert fitted(on_cpu, sized(1, on_cpu), Machines(1, H100)).trainer.gpus_per_rank == 0.0


@pytest.mark.usefixtures("forked_answers")
def test_the_command_says_what_a_run_takes_or_what_is_wrong_and_leaves_nothing(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, "off")
    path = material.write_config(tmp_path / "config", tmp_path / "run")
    result = run("check", str(path))
    assert result.exit_code == 0, result.output
    assert "can run" in result.stdout
    assert "million" not in result.stdout
    assert "parameters" in result.stdout
    assert not (tmp_path / "run").exists()
    nccl = ["--set", "checkpoint_engine.backend=nccl"]
    elsewhere = run("check", str(path), "--on", "2xh100", *nccl)
    assert elsewhere.exit_code == 0, elsewhere.output
    assert "on 2xh100, predicted" in elsewhere.stdout
    assert "1 ranks x 1 GPUs" in elsewhere.stdout
    assert_refused("need 2 GPUs, but there are 1", "check", str(path), "--on", "1xh100", *nccl)
    assert_refused("Known: a100, ", "check", str(path), "--on", "2xabacus")
    assert_refused("203.0.113.7", "check", str(path), "--set", "sync.host=203.0.113.7")
    assert_refused("my..host", "check", str(path), "--set", "sync.host=my..host", "--set", "ray.address=auto")
    assert_refused("could not be imported", "check", str(path), "--set", "reward.function=nobody:home")
    small = ["--set", "rollout.staging_limit_bytes=100", "--set", "checkpoint_engine.backend=gloo"]
    assert_refused("to stage a version, and rollout.staging_limit_bytes allows 0.0 MiB", "check", str(path), *small)


def test_a_run_is_scaled_as_far_as_its_limits_and_its_machines_allow() -> None:
    rollout = {"sizes": [2, 1], "gpus_per_rank": 1, "max_replicas": 5}
    config = configured(trainer={"ranks": 2, "gpus_per_rank": 1}, rollout=rollout)
    assert (config.rollout.replicas, config.rollout.ranks) == (2, 3)
    assert reserved_cpus(config) == 2 + 3 + 3, "of those that may be added, too"
    sizes = [config.rollout.of_replica(f"rollout-{name}").tensor_parallel for name in ("0", "0.1", "1", "7")]
    assert sizes == [2, 2, 1, 1], "a successor has the size of the dead one"
    check_replicas(config, 5, Machines(8, H100), cpus=8)
    for wanted, gpus, cpus, said in (
        (5, 7, 8, "need 8 GPUs, but there are 7"),
        (5, 8, 7, "reserve 8 CPUs, but Ray has 7"),
        (6, 99, 99, "rollout.max_replicas is 5"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_replicas(config, wanted, Machines(gpus, H100), cpus)
    following = configured(rollout={"autoscale": True})
    with pytest.raises(ConfigError, match="follows the machines"):
        check_replicas(following, 2, Machines(8, H100), 99)
    idle = configured(rollout={"autoscale": True, "cpus_per_rank": 0})
    with pytest.raises(ConfigError, match="reserve nothing"):
        fitted(idle, sized(1, idle), Machines(0))
    for wrong in ({"sizes": [2, 1], "replicas": 3}, {"autoscale": True, "replicas": 1, "min_replicas": 2}):
        with pytest.raises(ValueError, match="replicas is"):
            configured(rollout=wrong)
