"""A rank that a program drives computes and trains in its slots as PEFT does in float64, and refuses what would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft_oracle
import pytest
from engine_batches import make_samples
from engine_ranks import FSDP2_CP2, FSDP2_TP2, Ranks, Teams, assert_same, case, checkpoint, exhaustive, megatron, whole

from weightlane.trainer.user_program.inputs import ForwardInput
from weightlane.trainer.user_program.memory import MemoryEstimate

pytestmark = pytest.mark.skipif(not peft_oracle.PEFT.is_dir(), reason="PEFT is not installed (see .ci/setup-env)")

ROWS = 7
MODEL, EXPERTS = "qwen2", "qwen3-moe"
ADAPTERS = ("one", "two")
RECOMPUTED = {"activation_checkpointing": True}
EP2 = megatron({"expert_parallel": 2})
LAYOUTS = [
    case(MODEL, RECOMPUTED, id="fsdp2-2, recomputed"),
    exhaustive(MODEL, {"fsdp2": {"tensor_parallel": 2, "packing": "off"}}, id="fsdp2-tp2, padded"),
    exhaustive(MODEL, {**FSDP2_CP2, **RECOMPUTED}, id="fsdp2-cp2, recomputed"),
    exhaustive(MODEL, megatron({}), id="megatron-dp2"),
    exhaustive(EXPERTS, RECOMPUTED, id="fsdp2-2, experts, recomputed"),
    case(EXPERTS, {**EP2, **RECOMPUTED}, id="megatron-ep2, recomputed"),
    exhaustive(
        EXPERTS, megatron({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}), id="sp2, ep2"
    ),
]
"""Model, and settings of two ranks."""
Opened = Callable[..., Ranks]


@pytest.fixture(scope="module")
def adapters(
    oracle: Ranks, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Path]]:
    """Adapters by PEFT for each model, each with other values, rank and scale."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        for model in (MODEL, EXPERTS):
            about = {"seed": seed, "r": 2 + seed, "lora_alpha": 5 + seed}
            oracle.all("make", model=models[model], directory=root / model / name, **about)
    return {model: {name: root / model / name for name in ADAPTERS} for model in (MODEL, EXPERTS)}


@pytest.fixture
def made(adapters: dict[str, dict[str, Path]]) -> dict[str, Path]:
    return adapters[MODEL]


@pytest.fixture
def opened(teams: Teams) -> Opened:
    """Opens `TrainerRank` on every rank of a team."""

    def open_ranks(
        world: int = 2, settings: dict[str, Any] | None = None, limit: int | None = None, model: str = MODEL
    ) -> Ranks:
        ranks = teams.of(world)
        ranks.all("open_rank", model=teams.models[model], trainer=settings or {}, limit=limit)
        return ranks

    return open_ranks


def relative(found: Any, wanted: Any) -> float:
    difference = np.asarray(found, np.float64) - wanted
    return float(np.sqrt(np.square(difference).sum() / np.square(wanted).sum()))


def joined(answers: list[dict[Any, Any]]) -> dict[Any, Any]:
    return {key: value for answer in answers for key, value in answer.items()}


@pytest.mark.parametrize(("model", "settings"), LAYOUTS)
def test_every_output_of_every_slot_is_that_of_peft_in_one_mixed_batch(
    opened: Opened,
    oracle: Ranks,
    teams: Teams,
    adapters: dict[str, dict[str, Path]],
    model: str,
    settings: dict[str, Any],
) -> None:
    """Log-probabilities, entropies, logits and the most probable tokens; the model's head makes logits of hidden states."""
    ranks, made = opened(2, settings, model=model), adapters[model]
    ranks.all("load_slot", kind="checkpoint", name="one", source=made["one"])
    ranks.all("load_slot", kind="lora", name="two", source=made["two"])
    slots: list[dict[str, Any]] = [{"checkpoint": "one"}, {"lora": None}, {"lora": "two"}]
    found = joined(ranks.all("slot_logprobs", slots=slots, rows=ROWS))
    assert sorted(found) == [(row, slot) for row in range(ROWS) for slot in range(3)]
    path = teams.models[model]
    weights = checkpoint(path)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float().numpy()
    for slot, directory in enumerate((made["one"], None, made["two"])):
        (logs,) = oracle.all("logprobs", model=path, adapter=directory, rows=ROWS, every_token=True)
        for row, sample in enumerate(make_samples(0, ROWS)):
            mine = found[row, slot]
            chosen = logs[row][range(len(sample.completion_ids)), sample.completion_ids]
            assert relative(mine["logprobs"], chosen) < 1e-6
            assert relative(mine["entropy"], -(np.exp(logs[row]) * logs[row]).sum(1)) < 1e-6
            logits = mine["logits"].astype(np.float64) / peft_oracle.TEMPERATURE
            assert relative(logits - np.log(np.exp(logits).sum(1, keepdims=True)), logs[row]) < 1e-6
            assert relative(mine["hidden"] @ head.T, mine["logits"].astype(np.float64)) < 1e-6
            order = np.argsort(-logs[row], 1)[:, :5]
            assert (mine["top_tokens"] == order).all()
            assert relative(mine["top_logprobs"], np.take_along_axis(logs[row], order, 1)) < 1e-6


@pytest.mark.parametrize(("model", "settings"), [exhaustive(MODEL, RECOMPUTED, id="fsdp2-2, recomputed"), *LAYOUTS[1:]])
def test_gradients_of_several_checkpoints_are_those_of_peft_however_micro_batches_are_cut(
    opened: Opened,
    oracle: Ranks,
    teams: Teams,
    adapters: dict[str, dict[str, Path]],
    model: str,
    settings: dict[str, Any],
) -> None:
    """Also where one rank has nothing in a micro-batch; a step of one checkpoint is alone in its gradient."""
    own, made = {"one": list(range(ROWS)), "two": [0, 1, 2]}, adapters[model]
    wanted = {
        name: oracle.all("gradient", model=teams.models[model], adapter=made[name], rows=len(rows))[0]
        for name, rows in own.items()
    }
    shapes = set()
    for limit, how in ((None, "plain backward"), (200_000, "at once"), (None, "one by one")):
        ranks = opened(2, settings, limit, model)
        for name in own:
            ranks.all("load_slot", kind="checkpoint", name=name, source=made[name])
        if how == "plain backward" and "expert_parallel" in str(settings):
            ranks.all_fail(
                "ProtocolError", "call TrainerRank.backward", "slot_gradients", losses=own, rows=ROWS, how=how
            )
            continue
        answers = ranks.all("slot_gradients", losses=own, rows=ROWS, how=how)
        shapes.add(tuple(tuple(answer[1]) for answer in answers))
        shares = (
            1 if {"tensor_parallel", "context_parallel"} & {*settings.get("megatron", settings.get("fsdp2", {}))} else 2
        )
        for name, (loss, gradient) in wanted.items():
            assert sum(answer[2][name] for answer in answers[:shares]) == pytest.approx(loss, rel=1e-6)
            norm = sum(float(np.square(each).sum()) for each in gradient.values()) ** 0.5
            for answer in answers:
                assert answer[0][name] == pytest.approx(norm, rel=1e-6)
            held = whole(ranks.all("adapter_state", name=name))
            moments = {key.removesuffix("|exp_avg"): each for key, each in held.items() if key.endswith("|exp_avg")}
            assert moments.keys() == gradient.keys()
            flat = [np.concatenate([np.ravel(each[key]) for key in gradient]) for each in (moments, gradient)]
            assert relative(*flat) < 1e-6
    assert len(shapes) > 1, "a limit of memory cuts other micro-batches"
    assert shares == 1 or any(0 in of_rank for shape in shapes for of_rank in shape)


def test_what_an_input_names_comes_before_what_was_pushed_and_that_before_the_default(
    opened: Opened, made: dict[str, Path]
) -> None:
    ranks = opened(1)
    ranks.all("load_slot", kind="checkpoint", name="one", source=made["one"])
    ranks.all("load_slot", kind="lora", name="two", source=made["two"])
    ((base, one, two),) = ranks.all(
        "choose", calls=[("set_lora", None), ("set_checkpoint", "one"), ("set_lora", "two")]
    )
    assert len({base, one, two}) == 3
    calls = [("push_checkpoint", "one"), ("push_lora", None), ("pop", None), ("pop", None), ("set_checkpoint", None)]
    assert ranks.all("choose", calls=calls) == [[one, base, one, two, base]]
    for says, do, name in (
        ("'two' is a LoRA", "set_checkpoint", "two"),
        ("there is no LoRA 'three'. Load it by load_lora", "push_lora", "three"),
    ):
        ranks.all_fail("ConfigError", says, "choose", calls=[(do, name)])
    ranks.all_fail("ProtocolError", "no LoRA or checkpoint is pushed", "choose", calls=[("pop", None)])
    ranks.all_fail("ConfigError", "'two' is the name of a LoRA", "load_slot", kind="checkpoint", name="two")


def test_a_slot_whose_graph_waits_is_neither_stepped_nor_replaced(opened: Opened, made: dict[str, Path]) -> None:
    """A graph waits on one rank only, and the refusal is on both; dropped outputs, and those without gradient, keep nothing."""
    ranks = opened()
    for name in ("one", "two"):
        ranks.all("load_slot", kind="checkpoint", name=name, source=made[name])
    ranks.all_fail("ProtocolError", "there is no gradient.", "step_slots")
    ranks.all("keep_forward", rows=[0, 1], asked={"checkpoint": "one"})
    ranks.all("backward_kept")
    before = whole(ranks.all("adapter_state", name="one"))
    ranks.all("keep_forward", rows=[2], asked={"checkpoint": "one"})
    ranks.all("drop_kept", ranks=[0])
    waits = ("ProtocolError", "a forward pass of 'one' waits for its backward pass")
    ranks.all_fail(*waits, "step_slots")
    ranks.all_fail(*waits, "load_slot", kind="checkpoint", name="one", source=made["one"])
    assert_same(whole(ranks.all("adapter_state", name="one")), before)
    ranks.all_fail("ProtocolError", "the ranks keep 0, 1 forward passes", "backward_kept")
    ranks.all_fail("ProtocolError", "there is no gradient of 'two'", "step_slots", checkpoints=["two"])
    ranks.all("drop_kept", ranks=[1])
    ranks.all("keep_forward", rows=[2], asked={"checkpoint": "one"}, grad=False)
    assert {tuple(norms) for norms in ranks.all("step_slots")} == {("one",)}
    ranks.all("load_slot", kind="checkpoint", name="one", source=made["one"])


@pytest.mark.parametrize(
    ("model", "settings"), [case(MODEL, RECOMPUTED, id="fsdp2"), exhaustive(EXPERTS, {**EP2, **RECOMPUTED}, id="ep2")]
)
def test_ranks_may_have_other_inputs_of_other_slots_or_none(
    opened: Opened, adapters: dict[str, dict[str, Path]], model: str, settings: dict[str, Any]
) -> None:
    """A pass that a rank computes for the others' sake adds nothing to any gradient."""
    ranks, made = opened(2, settings, model=model), adapters[model]
    for name in ("one", "two"):
        ranks.all("load_slot", kind="checkpoint", name=name, source=made[name])
    alone = []
    for by_rank in ([([0, 1], "one"), ([], "two")], [([1], "one"), ([0], "one")]):
        for rank, (rows, slot) in enumerate(by_rank):
            ranks.tell(rank, "keep_forward", rows=rows, asked={"checkpoint": slot})
        assert [ranks.answer(rank)["ok"] for rank in range(2)] == [len(rows) for rows, _ in by_rank]
        ranks.all("backward_kept")
        alone.append(ranks.all("step_slots")[0])
        ranks.all("load_slot", kind="checkpoint", name="one", source=made["one"])
    assert alone[0] == {"one": pytest.approx(alone[1]["one"], rel=1e-6)}
    for rank, (rows, slot) in enumerate((([2], "one"), ([3, 4], "two"))):
        ranks.tell(rank, "keep_forward", rows=rows, asked={"checkpoint": slot})
    assert [ranks.answer(rank)["ok"] for rank in range(2)] == [1, 2]
    ranks.all("backward_kept")
    assert [sorted(norms) for norms in ranks.all("step_slots")] == [["one", "two"]] * 2

    def keep_on_rank_zero() -> None:
        for rank, rows in enumerate(([0], [])):
            ranks.tell(rank, "keep_forward", rows=rows, asked={"checkpoint": "one"})
        assert [ranks.answer(rank)["ok"] for rank in range(2)] == [1, 0]

    keep_on_rank_zero()
    ranks.all("keep_forward", rows=[1], asked={"checkpoint": "one"})
    ranks.all("drop_kept", ranks=[1])
    differ = "forward passes that wait for backward, not the same ones"
    if model == EXPERTS:
        ranks.all_fail("ProtocolError", f"keep 1, 1 {differ}", "backward_kept")
    else:  # ranks exchange nothing in which passes must be the same
        ranks.all("backward_kept")
    keep_on_rank_zero()
    ranks.all("drop_kept", ranks=[0])
    ranks.all_fail("ProtocolError", f"keep 0, 1 {differ}", "backward_kept")
    ranks.all("backward_kept")  # nothing is left, on rank 1 neither


def test_a_saved_checkpoint_goes_on_bit_for_bit_and_a_gradient_that_is_no_number_changes_nothing(
    opened: Opened, made: dict[str, Path], tmp_path: Path
) -> None:
    ranks = opened()
    ranks.all("load_slot", kind="checkpoint", name="one", source=made["one"])
    ranks.all("choose", calls=[("set_checkpoint", "one")])
    ranks.all("slot_steps", name="one", first=0, count=2)
    ranks.all("save_slot", name="one", directory=tmp_path / "one")
    before = whole(ranks.all("adapter_state", name="one"))
    ranks.all_fail(
        "GradientError", "the gradient norm of 'one' is nan", "slot_steps", name="one", first=2, count=1, spoil=True
    )
    assert_same(whole(ranks.all("adapter_state", name="one")), before)
    ranks.all("slot_steps", name="one", first=2, count=2)
    wanted = whole(ranks.all("adapter_state", name="one"))
    ranks.all("load_slot", kind="checkpoint", name="one", source=tmp_path / "one")
    assert_same(whole(ranks.all("adapter_state", name="one")), before)
    ranks.all("slot_steps", name="one", first=2, count=2)
    assert_same(whole(ranks.all("adapter_state", name="one")), wanted)
    ranks.all_fail("ConfigError", "there is no checkpoint 'x'", "save_slot", name="x", directory=tmp_path / "x")


def test_micro_batches_are_as_wide_as_memory_allows_and_what_was_measured_corrects_the_prediction(
    opened: Opened,
) -> None:
    ranks = opened(2)
    ranks.all("load_slot", kind="checkpoint", name="a", rank=2)
    ranks.all("choose", calls=[("set_checkpoint", "a")])
    lengths = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    first, second = ranks.all("sizes", lengths=lengths, limit=60_000)
    assert [each[:2] for each in first] == [each[:2] for each in second]
    order = [index for mine, theirs in zip(first, second, strict=True) for index in mine[2] + theirs[2]]
    assert order == list(range(11)) * 2
    assert all(predicted <= 60_000 for *_, predicted, _ in first)
    again = next(number for number, each in enumerate(first) if number and each[0] == 0)
    assert first[again][1] > first[0][1], "what was measured is less than the first guess, so more items fit"
    measured = [each for each in (*first, *second) if each[4]]
    assert measured
    ranks.all_fail("ForwardMemoryError", "item 5 would take", "sizes", lengths=lengths, limit=30_000)


def test_a_fixed_part_of_memory_is_not_taken_for_tokens_and_what_fitted_fits() -> None:
    """Short passes take a gigabyte of workspace on a GPU."""
    estimate = MemoryEstimate([512, 512], 2, vocabulary=1000, hidden=64)

    def item(tokens: int) -> ForwardInput:
        return ForwardInput(input_tokens=[1] * tokens)

    def predicted(tokens: int) -> float:
        return estimate.fixed[True] + estimate.of(item(tokens), gradient=True)

    for tokens in (4, 5, 4, 6):
        estimate.learn([item(tokens)], (1 << 30) + 3000 * tokens, gradient=True)
    assert (1 << 30) < predicted(4096) < 1.1 * (1 << 30), "the short passes say nothing of a token"
    for _ in range(20):
        estimate.learn([item(4000)], (1 << 30) + 3000 * 4000, gradient=True)
    assert predicted(4000) <= (1 << 30) + 3000 * 4000, "that is what it took"
    another = MemoryEstimate([512, 512], 2, vocabulary=1000, hidden=64)
    another.learn([item(100)], 10**6, gradient=True)
    told = [estimate.to_plain(), another.to_plain()]
    for each in (estimate, another):
        each.raise_to(told)
    alike = [[each.of(item(tokens), gradient=True) for tokens in (10, 100, 4000)] for each in (estimate, another)]
    assert alike[0] == alike[1], "or ranks would plan other micro-batches, and wait for each other"
    for _ in range(20):
        estimate.learn([item(2000)] * 4, 1000 * 2000, gradient=True, computed=2000)  # of one prompt
        estimate.learn([item(500)], 1000 * 500, gradient=True)
    assert predicted(8000) == pytest.approx(1.1 * 8000 * 1000, rel=0.01), "workspace that is there no more is forgotten"


def test_inputs_that_are_wrong_are_refused_by_name_on_every_rank(opened: Opened) -> None:
    ranks = opened()
    good = {"input_tokens": [1, 2], "target_tokens": [2, 3]}
    for error, text, fields in (
        ("ProtocolError", "at least one token", {"input_tokens": []}),
        ("ProtocolError", "targets has shape [1, 1] beside 2 tokens", {**good, "target_tokens": [2]}),
        ("ProtocolError", "names a LoRA and a checkpoint", {**good, "lora": None, "checkpoint": None}),
        ("ProtocolError", "temperature is 0.0", {**good, "temperature": 0.0}),
        ("ProtocolError", "top_k is -1", {**good, "top_k": -1}),
    ):
        ranks.all_fail(error, text, "ask_own", **fields)
    bad = {"input_tokens": [1, 2], "target_tokens": [2, 99]}
    ranks.all_fail("ProtocolError", "99", "ask_alike", inputs=[good, bad])
    ranks.all_fail("ProtocolError", "top_k of sequence 1 is 999", "ask_alike", inputs=[good, {**good, "top_k": 999}])
    ranks.all_fail("ConfigError", "there is no checkpoint 'x'", "ask_alike", inputs=[good, {**good, "checkpoint": "x"}])
    for rank, other in enumerate((good, {**good, "target_tokens": [2, 4]})):
        ranks.tell(rank, "ask_alike", inputs=[good, other])
    assert all("were given different inputs" in ranks.answer(rank)["message"] for rank in range(2))
    split = opened(settings=FSDP2_TP2)
    for rank, other in enumerate((good, {**good, "top_k": 2})):
        split.tell(rank, "ask_own", **other)
    assert all("were given different inputs" in split.answer(rank)["message"] for rank in range(2))
