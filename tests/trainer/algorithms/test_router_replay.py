"""Router replay: trainers compute with the experts that rollouts chose, weighted by the trainers' own routers."""

from __future__ import annotations

import asyncio
import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import make_samples, routes
from engine_ranks import FSDP2_CP2, FSDP2_TP2, Teams, case, exhaustive, gathered, megatron, whole
from tiny_models import add_tokenizer, make_qwen3_moe
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from zoo_kind import make
from zoo_models import ZOO

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.rollout.config import RolloutConfig
from weightlane.rollout.contract.requests import GenerationRequest, Sampling
from weightlane.rollout.engines.transformers.engine import TransformersEngine
from weightlane.rollout.engines.transformers.routed_experts import recorded_experts
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.data.sequences import ROUTED_EXPERTS, MicroBatch, TokenSequence
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.engines.fsdp2.loading import decoder_layers
from weightlane.trainer.engines.fsdp2.router_replay import RouterReplay
from weightlane.trainer.engines.head import PassQuery
from weightlane.trainer.engines.hf.checkpoint import whole_model
from weightlane.trainer.engines.hf.heads import HeadQuery, replace_head
from weightlane.trainer.engines.hf.layout import Layout
from weightlane.trainer.engines.hf.packed_attention import pack_attention
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Played, Trajectory, Turn
from weightlane.trainer.objectives.config import AlgorithmConfig

VOCAB, LAYERS, EXPERTS = 61, 2, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "q_lora_rank": None,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
MODELS: dict[str, Any] = {
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=12, num_experts=EXPERTS, norm_topk_prob=True
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=12, shared_expert_intermediate_size=24, num_experts=EXPERTS
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "olmoe": OlmoeConfig(**SIZES, num_experts=EXPERTS),
    "deepseek-v2": DeepseekV2Config(**SIZES, **LATENT, topk_method="group_limited_greedy"),
    "deepseek-v3": DeepseekV3Config(**SIZES, **LATENT),
    "gpt-oss": GptOssConfig(**SIZES, head_dim=8, num_local_experts=EXPERTS),
}
NORMALISED = ("qwen3-moe", "mixtral", "deepseek-v3")


def weights_of_all(name: str, config: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weight of every expert, 0 for those that are not `chosen`, as the architecture's report says: [tokens, experts]."""
    if name == "gpt-oss":
        return torch.where(chosen, logits, -torch.inf).softmax(-1)
    weights = chosen * (logits.sigmoid() if name == "deepseek-v3" else logits.softmax(-1))
    weights = weights / weights.sum(-1, keepdim=True) if name in NORMALISED else weights
    return weights * getattr(config, "routed_scaling_factor", 1.0)


def route_by_sum(model: Any, name: str, given: torch.Tensor) -> None:
    """Let routers of transformers send every token to all experts, those other than `given` with weight 0.

    A token without given experts gets those of the router.
    """
    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)

        def dense(hidden: torch.Tensor, router: Any = router, own: Any = router.forward, number: int = number) -> Any:
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits = torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))
            every = torch.arange(logits.shape[1])
            experts = torch.where(given[:, number] >= 0, given[:, number].long(), own(hidden)[2])
            weights = weights_of_all(name, model.config, logits, (experts[:, :, None] == every).any(1))
            return logits, weights, every.expand(len(hidden), -1)

        router.forward = dense


def computed(model: Any, replay: RouterReplay | None, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Log-probabilities of all targets, and the gradients of their sum; with `replay`, by the experts of the micro-batch."""
    layout = Layout.packed([micro], share=True)
    query = HeadQuery(PassQuery(torch.arange(len(micro.tokens))), micro, layout.places)
    model.zero_grad()
    with nullcontext() if replay is None else replay.active(layout):
        found = model(query, **layout.inputs)["logprobs"]
        found.sum().backward()
    return found.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_are_those_of_a_sum_over_all_experts_and_replaying_the_models_own_changes_no_bit(
    name: str,
) -> None:
    torch.manual_seed(0)
    configs = copy.deepcopy(MODELS[name]), copy.deepcopy(MODELS[name])
    model, oracle = (AutoModelForCausalLM.from_config(each, dtype=torch.float64).eval() for each in configs)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.uniform_(0.1, 0.9)
    oracle.load_state_dict(model.state_dict())
    for each in (model, oracle):
        each.set_experts_implementation("eager")
    pack_attention(model)
    replace_head(model)
    replay = RouterReplay(model, decoder_layers(model))
    start = torch.randint(VOCAB, (20,))
    drawn = [torch.cat([start, torch.randint(VOCAB, (rest,))]) for rest in (9, 4, 1)]
    given = [
        routes(tokens[:-1], LAYERS, EXPERTS, turned=turned) for tokens, turned in zip(drawn, (0, 1, 1), strict=True)
    ]

    def batch(experts: list[torch.Tensor]) -> MicroBatch:
        pairs = zip(drawn, experts, strict=True)
        return MicroBatch.of([TokenSequence(each[:-1], each[1:], {ROUTED_EXPERTS: rows}) for each, rows in pairs])

    micro = batch(given)
    assert Layout.packed([micro], share=True).counts == (28 + 20 + 3,), (
        "sequences share a prefix if its routes are equal"
    )
    logprobs, gradients = computed(model, replay, micro)
    wanted = []
    routers = [(each, each.forward) for each in oracle.modules() if type(each).__name__.lower().endswith("topkrouter")]
    for tokens, rows in zip(drawn, given, strict=True):
        for router, forward in routers:
            router.forward = forward
        route_by_sum(oracle, name, rows)
        wanted.append(
            oracle(tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)[range(len(rows)), tokens[1:]]
        )
        wanted[-1].sum().backward()
    torch.testing.assert_close(logprobs.double(), torch.cat(wanted).detach(), atol=3e-6, rtol=1e-6)
    theirs = {key: each.grad for key, each in oracle.named_parameters() if each.grad is not None}
    assert theirs.keys() == gradients.keys()
    difference, size = (
        sum(float(each.square().sum()) for each in grads) ** 0.5
        for grads in ([gradients[key] - theirs[key] for key in theirs], theirs.values())
    )
    assert difference < 2e-6 * size, difference / size

    layout = Layout.packed([micro])
    with recorded_experts(model, len(micro.tokens)) as own, torch.no_grad():
        model(HeadQuery(PassQuery(torch.arange(1)), micro, layout.places), **layout.inputs)
    assert (torch.from_numpy(own) != torch.cat(given)).any()
    micro = batch(micro.split(torch.from_numpy(own)))
    (plain, its), (again, same) = computed(model, None, micro), computed(model, replay, micro)
    assert torch.equal(again, plain)
    assert all(torch.equal(same[key], each) for key, each in its.items())


@pytest.mark.exhaustive
def test_every_architecture_with_experts_but_phimoe_sends_tokens_where_it_is_told_to(tmp_path: Path) -> None:
    """And computes the same bits if it is told its own choice."""
    done = []
    for kind in (each for each in ZOO if each.backend == "vllm" and each.group != "pooling"):
        model: Any = whole_model(make(kind, tmp_path / kind.name, seed=0, dtype=torch.float32))
        if not any(name.endswith(".experts") for name, _ in model.named_modules()):
            continue
        replay, tokens = RouterReplay(model, decoder_layers(model)), torch.arange(3, 12)
        with recorded_experts(model, 9) as own, torch.no_grad():
            plain = model(tokens[None], use_cache=False).logits
        choices = torch.from_numpy(own), torch.from_numpy(np.where(own < 0, own, (own + 1) % replay._experts))
        for given in choices:
            micro = MicroBatch.of([TokenSequence(tokens, tokens, {ROUTED_EXPERTS: given})])
            with (
                nullcontext() if kind.name != "phimoe" else pytest.raises(ConfigError, match="by 0 calls of topk"),
                recorded_experts(model, 9) as reached,
                replay.active(Layout.padded(micro)),
                torch.no_grad(),
            ):
                logits = model(tokens[None], use_cache=False).logits
                assert torch.equal(torch.from_numpy(reached), given), kind.name
                assert torch.equal(logits, plain) is (given is choices[0]), kind.name
        done.append(kind.name)
    assert len(done) == 24


RECOMPUTED = {"activation_checkpointing": True}
TP_EP = {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}


@pytest.mark.parametrize(
    ("name", "world", "trainer"),
    [
        exhaustive("qwen3-moe", 2, {**FSDP2_CP2, **RECOMPUTED}, id="fsdp2-cp2, recomputed"),
        case("deepseek-v3", 2, megatron(TP_EP, **RECOMPUTED), id="megatron-tp2-ep2, recomputed"),
        exhaustive("qwen3-moe", 2, FSDP2_TP2, id="fsdp2-tp2"),
        exhaustive("qwen3-moe", 2, {"fsdp2": {"packing": "off"}}, id="fsdp2-2, padded"),
        exhaustive("qwen3-moe", 4, megatron({"pipeline_parallel": 2, "virtual_pipeline": 2}, **RECOMPUTED), id="vpp2"),
        exhaustive("qwen3-moe", 4, megatron({"context_parallel": 2, "expert_parallel": 2}), id="megatron-cp2-ep2"),
        exhaustive("gpt-oss", 2, megatron({}), id="megatron-dp2"),
    ],
)
def test_every_layout_routes_tokens_as_the_batch_says(
    teams: Teams, name: str, world: int, trainer: dict[str, Any]
) -> None:
    """One rank of FSDP2 computes as transformers with routers that weigh all experts; other layouts, as it does."""
    settings = {"router_replay": True, "betas": (0.0, 0.9), "micro_batch_tokens": 40, "max_grad_norm": 1e9}
    found = []
    for count, layout in ((1, {}), (world, trainer)):
        ranks = teams.of(count)
        ranks.setup(name, **settings, **layout)
        logprobs = {row: each["logprobs"] for one in ranks.all("forward", experts=4) for row, each in one.items()}
        answers = ranks.all("gradient", rows=6, calls=[[0, 1, 2, 3, 4, 5]], loss="policy", experts=4)
        weights = gathered(ranks)
        gradient = whole([[(key, weights[key].shape, *rest) for key, *rest in slices] for _, slices in answers])
        found.append((logprobs, gradient))
    (alone, whole_gradient), (shared, summed) = found
    assert alone.keys() == shared.keys() == set(range(6))
    for row, sample in enumerate(make_samples(0)):
        model: Any = AutoModelForCausalLM.from_pretrained(teams.models[name], dtype=torch.float64).eval()
        model.set_experts_implementation("eager")
        sequence = sample.sequence(4)
        route_by_sum(model, name, sequence.per_token[ROUTED_EXPERTS])
        with torch.no_grad():
            logs = (model(sequence.tokens[None], use_cache=False).logits[0] / 0.9).log_softmax(-1)
        places = (sequence.targets >= 0).nonzero()[:, 0]
        wanted = logs[places, sequence.targets[places]].float()
        for each in (alone, shared):
            torch.testing.assert_close(torch.from_numpy(each[row])[places], wanted, atol=2e-5, rtol=1e-5)
    assert summed.keys() == whole_gradient.keys()
    for key, each in whole_gradient.items():
        torch.testing.assert_close(summed[key], each, atol=2e-5, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def test_the_experts_of_rollouts_reach_each_token_at_the_rank_over_several_turns(teams: Teams, tmp_path: Path) -> None:
    """A rollout in bfloat16, and a trainer in float32."""
    model = make_qwen3_moe(tmp_path / "model", seed=0)
    add_tokenizer(model)
    config = RolloutConfig(engine="transformers", dtype="bfloat16", max_model_len=32, routed_experts=True)

    async def episode(engine: TransformersEngine, number: int) -> Played:
        turns, ids = [], list[int]()
        for read in ([5 + number, 9, 3], [7, number]):
            ids += read
            request = GenerationRequest(f"{number}-{len(ids)}", "", list(ids), Sampling(8, seed=number))
            turns.append(Turn(read, await engine.generate(request, lambda _: None)))
            ids += turns[-1].completion.token_ids
        return Played(Trajectory(turns), reward=float(number % 2))

    async def play() -> list[Played]:
        engine = TransformersEngine("rollout-0", config, model)
        await engine.start(0)
        try:
            return [await episode(engine, number) for number in range(12)]
        finally:
            await engine.close()

    group = PromptGroup(Task("", ""), asyncio.run(play()), "rollout-0")
    batch, _ = to_batch([group], AlgorithmConfig(router_replay=True, compute_zero_advantage=True))
    given = [
        (token, *row)
        for each in batch.sequences
        for token, row in zip(each.tokens.tolist(), each.per_token[ROUTED_EXPERTS].flatten(1).tolist(), strict=True)
    ]
    for replays in (True, False):
        ranks = teams.of(1)
        ranks.all("setup", model=model, trainer={"router_replay": replays})
        (reached,) = ranks.all("reached_experts", batch=pickle.dumps(batch))
        assert (sorted(reached) == sorted(given)) is replays


def test_batches_models_and_programs_without_experts_are_refused(models: dict[str, Path]) -> None:
    for engine, world in (("fsdp2", 1), ("megatron", 1)):
        config = TrainerConfig(engine=engine, device="cpu", ranks=world, router_replay=True)
        with pytest.raises(ConfigError, match=r"algorithm\.router_replay is true, (and|but) .* no "):
            training_engine_class(engine).check(config, models["qwen3-tied"])
        training_engine_class(engine).check(config, models["qwen3-moe"])
    with pytest.raises(ConfigError, match="passes of a program come without experts"):
        Fsdp2Engine(config, 0, 1, ("", 0)).lay_out([])
    model: Any = AutoModelForCausalLM.from_pretrained(models["qwen3-moe"])
    replay = RouterReplay(model, decoder_layers(model))
    tokens = torch.arange(5)
    for rows, says in (
        (None, "per-token value routed_experts, and the batch has none"),
        (routes(tokens, 3, 4), "of 3 layers, and the model has 4 experts in 4 layers"),
        (routes(tokens, 4, 9), "0 to 8|-1 to 8"),
    ):
        micro = MicroBatch.of([TokenSequence(tokens, tokens, {} if rows is None else {ROUTED_EXPERTS: rows})])
        with pytest.raises(ProtocolError, match=says), replay.active(Layout.padded(micro)):
            pass
    micro = MicroBatch.of([TokenSequence(tokens, tokens, {ROUTED_EXPERTS: routes(tokens, 4, 4)[..., :1]})])
    with pytest.raises(ConfigError, match="chooses 1 of all experts by 0 calls"), replay.active(Layout.padded(micro)):
        model(tokens[None])
    turns = [Turn([1, 2], SimpleNamespace(token_ids=[3], routed_experts=rows)) for rows in (None, routes(tokens, 4, 4))]
    for turn, says in zip(turns, ("2 tokens were read, and no", "2 tokens were read, and 5"), strict=True):
        with pytest.raises(ProtocolError, match=says):
            Trajectory([turn]).routed_experts  # noqa: B018 - raises
