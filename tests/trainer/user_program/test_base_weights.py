"""The model's own weights are trained beside adapters as in one process in float64, resumed bit for bit, and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft_oracle
import pytest
import torch
from engine_ranks import FSDP2_CP2, Ranks, Teams, assert_same, case, exhaustive, megatron, whole

pytestmark = pytest.mark.skipif(not peft_oracle.PEFT.is_dir(), reason="PEFT is not installed (see .ci/setup-env)")

ROWS = 7
MODEL, EXPERTS = "qwen2", "qwen3-moe"
BASE: dict[str, Any] = {"": list(range(ROWS))}
SLOT: dict[str, Any] = {"one": [0, 1, 2]}
ROUNDS = [BASE | SLOT, BASE, SLOT, BASE | SLOT]
STEPS: dict[str, Any] = {"betas": (0.0, 0.9), "eps": 1e-2, "weight_decay": 0.1}
"""AdamW whose first moment is the gradient, and which makes little of gradients next to 0."""
OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    case(MODEL, {"activation_checkpointing": True}, id="fsdp2-2, recomputed"),
    exhaustive(MODEL, {"fsdp2": {"tensor_parallel": 2, "packing": "off"}}, id="fsdp2-tp2, padded"),
    exhaustive(MODEL, megatron(OVERLAP, activation_checkpointing=True), id="megatron-dp2, overlapped, recomputed"),
    exhaustive(MODEL, FSDP2_CP2, id="fsdp2-cp2"),
    exhaustive(MODEL, megatron({"tensor_parallel": 2}), id="megatron-tp2"),
    exhaustive(MODEL, megatron({"context_parallel": 2}), id="megatron-cp2"),
    exhaustive(EXPERTS, megatron({"expert_parallel": 2}, activation_checkpointing=True), id="megatron-ep2, recomputed"),
]
"""Model, and settings of two ranks."""


@pytest.fixture(scope="module")
def adapters(oracle: Ranks, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter by PEFT for each model."""
    found = {model: tmp_path_factory.mktemp("adapters") / model for model in (MODEL, EXPERTS)}
    for model, directory in found.items():
        oracle.all("make", model=models[model], directory=directory, seed=0, r=2, lora_alpha=5)
    return found


@pytest.fixture
def made(adapters: dict[str, Path]) -> Path:
    return adapters[MODEL]


def opened(
    teams: Teams,
    settings: dict[str, Any],
    made: Path | None,
    limit: int | None = None,
    model: str = MODEL,
    *,
    train_base: bool = True,
) -> Ranks:
    ranks = teams.of(2)
    ranks.all("open_rank", model=teams.models[model], trainer=settings, limit=limit, train_base=train_base)
    if made is not None:
        ranks.all("load_slot", kind="checkpoint", name="one", source=made)
    return ranks


def state(ranks: Ranks) -> dict[str, torch.Tensor]:
    """The model's own weights and their moments, and those of the adapter."""
    slot = {f"one|{key}": each for key, each in whole(ranks.all("adapter_state", name="one")).items()}
    return {**whole(ranks.all("base_state")), **slot}


def relative(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The norm of all differences, next to that of all that is wanted."""
    assert found.keys() == wanted.keys()
    flat, other = (np.concatenate([np.ravel(each[key]) for key in wanted]) for each in (found, wanted))
    return float(np.linalg.norm(flat.astype(np.float64) - other) / np.linalg.norm(other))


@pytest.mark.parametrize(("model", "settings"), LAYOUTS)
def test_base_and_slot_are_stepped_in_turns_as_in_one_process_in_float64(
    teams: Teams, oracle: Ranks, adapters: dict[str, Path], model: str, settings: dict[str, Any]
) -> None:
    """Gradients, norms and changes of both, from mixed batches; a step of one leaves the other's state as it is, bit for bit."""
    ranks = opened(teams, settings, adapters[model], 400_000, model)
    path, first = teams.models[model], state(ranks)
    about = {"rounds": ROUNDS, "rows": ROWS, "lr": 1e-2, "most": 0.7, **STEPS}
    ((norms, weights, matrices),) = oracle.all("rounds", model=path, adapter=adapters[model], **about)
    clipped = []
    for number, (losses, wanted) in enumerate(zip(ROUNDS, norms, strict=True)):
        before = state(ranks)
        how = ("at once", "one by one", "at once", "plain backward" if model == MODEL else "one by one")[number]
        answers = ranks.all(
            "slot_gradients", losses=losses, rows=ROWS, how=how, learning_rate=1e-2, max_grad_norm=0.7, **STEPS
        )
        assert [answer[0] for answer in answers] == [pytest.approx(wanted, rel=1e-5)] * 2
        clipped += [norm > 0.7 for norm in wanted.values()]
        after = state(ranks)
        for own in (True, False):
            if ("" if own else "one") not in losses:
                assert_same(
                    *({key: each[key] for key in each if key.startswith("one|") != own} for each in (before, after))
                )
    assert {True, False} <= {*clipped} or all(clipped)
    found = state(ranks)
    for wanted, own in ((weights, True), (matrices, False)):
        mine = {
            key.removeprefix("one|").removesuffix("|weight"): each.numpy()
            for key, each in found.items()
            if key.startswith("one|") != own and not key.endswith("_sq")
        }
        start = {
            key.removeprefix("one|").removesuffix("|weight"): each.numpy()
            for key, each in first.items()
            if key.startswith("one|") != own
        }
        plain = [key for key in wanted if not key.endswith("|exp_avg")]
        gradients = [key for key in wanted if key.endswith("|exp_avg")]
        assert len(gradients) == len(plain)
        assert relative({key: mine[key] for key in gradients}, {key: wanted[key] for key in gradients}) < 1e-5
        moved = [{key: each[key] - start[key].astype(np.float64) for key in plain} for each in (mine, wanted)]
        assert relative(*moved) < 1e-5
        assert mine.keys() == wanted.keys()


@pytest.mark.parametrize(
    "settings",
    [
        exhaustive({}, id="fsdp2"),
        *(exhaustive({"optimizer": name}, id=name) for name in ("adamw_bf16", "adamw_8bit", "muon")),
        exhaustive(megatron({"tensor_parallel": 2}), id="megatron"),
    ],
)
def test_base_and_slot_are_resumed_bit_for_bit_and_the_base_is_published_as_it_is(
    teams: Teams, made: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    def take(count: int) -> None:
        for _ in range(count):
            ranks.all("slot_gradients", losses=BASE | SLOT, rows=ROWS, how="at once", betas=(0.9, 0.99))

    ranks = opened(teams, settings, made)
    first = whole(ranks.all("base_state"))
    take(2)
    for slot in ("", "one"):
        ranks.all("save_slot", name=slot, directory=tmp_path / f"slot {slot}")
    take(2)
    wanted = state(ranks)
    ranks = opened(teams, settings, made=None)
    ranks.all("load_slot", kind="checkpoint", name="one", source=tmp_path / "slot one")
    ranks.all("load_slot", kind="checkpoint", name="", source=tmp_path / "slot ")
    take(2)
    assert_same(state(ranks), wanted)
    ranks.all("load_slot", kind="checkpoint", name="")
    assert_same(whole(ranks.all("base_state")), first)
    served = ranks.all("publish_base", steps=3)[0]
    now = {key: each for key, each in whole(ranks.all("base_state")).items() if "|" not in key}
    for versions in (served[0], served[1]):
        assert any((versions[key] != now[key].numpy()).any() for key in now)
    assert_same({key: torch.from_numpy(each) for key, each in served[2].items()}, now)


def test_what_would_be_wrong_is_refused_and_ranks_may_need_different_passes(teams: Teams, made: Path) -> None:
    """A loss of one rank depends on the model's own weights only, that of the other on an adapter only."""
    ranks = opened(teams, {"reshard_after_forward": False}, made)
    ranks.all("keep_forward", rows=[0, 1, 2], asked={"checkpoint": "one"})
    for do in ({"do": "step_slots", "checkpoints": [""]}, {"do": "load_slot", "kind": "checkpoint", "name": ""}):
        ranks.all_fail("ProtocolError", "which needs the model's own weights unchanged", do.pop("do"), **do)
    ranks.all("backward_kept")
    ranks.all_fail("ProtocolError", "no gradient of the model's own weights", "step_slots", checkpoints=[""])
    norms = {"one": ranks.all("step_slots")[0]["one"]}
    ranks.all("load_slot", kind="checkpoint", name="one", source=made)
    ranks.all("keep_forward", rows=[3, 4], asked={"checkpoint": None})
    ranks.all("backward_kept")
    before, choice = state(ranks), [("set_checkpoint", None)]
    said = ranks.all("choose", calls=choice)
    norms[""] = ranks.all("step_slots")[0][""]
    after = state(ranks)
    assert ranks.all("choose", calls=choice) != said, "gathered weights of a pass before the step would say the same"
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert not [key for key in changed if key.startswith("one|")]
    ranks.all("load_slot", kind="checkpoint", name="")
    assert ranks.all("choose", calls=choice) == said
    for rank, (rows, slot, other) in enumerate((([0, 1, 2], "one", None), ([3, 4], None, "one"))):
        ranks.tell(rank, "keep_forward", rows=rows, asked={"checkpoint": slot}, unused={"checkpoint": other})
    assert [ranks.answer(rank)["ok"] for rank in range(2)] == [4, 3]
    ranks.all("backward_kept")
    half = {slot: pytest.approx(norm / 2, rel=1e-6) for slot, norm in norms.items()}  # both ranks had these samples
    assert ranks.all("step_slots") == [half] * 2
    ranks.all("keep_forward", rows=[0], asked={"checkpoint": "one"}, unused={"checkpoint": None})
    ranks.all("backward_kept")
    assert [list(found) for found in ranks.all("step_slots")] == [["one"]] * 2, "no loss depended on the other"
    ranks.all_fail("ConfigError", "have no LoraConfig", "load_slot", kind="checkpoint", name="", rank=2)
    ranks = opened(teams, {}, None, train_base=False)
    for do in ("step_slots", "load_slot", "save_slot"):
        about: dict[str, Any] = {
            "step_slots": {"checkpoints": [""]},
            "load_slot": {"kind": "checkpoint", "name": ""},
        }.get(do, {"name": "", "directory": "nowhere"})
        ranks.all_fail("ConfigError", "own weights are frozen. Make the TrainerRank with train_base", do, **about)
