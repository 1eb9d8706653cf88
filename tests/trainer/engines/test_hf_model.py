"""Model directories are judged before anything is started for them, and written by all ranks."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memray
import pytest
import torch
import torch.distributed as dist
from engine_ranks import TRAINER, VOCAB, Teams
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from waiting import NEVER_S

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.engines.hf import rank_rounds
from weightlane.trainer.engines.hf.model_dir import check_model_dir, find_model
from weightlane.trainer.engines.hf.training_state import check_state


@pytest.fixture(scope="module")
def template(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, whose end-of-sequence token is not the tokenizer's."""
    path = tmp_path_factory.mktemp("template") / "model"
    model = AutoModelForCausalLM.from_pretrained(models["qwen3-tied"])
    model.config.eos_token_id = model.generation_config.eos_token_id = 5
    model.save_pretrained(path, max_shard_size=8000)
    AutoTokenizer.from_pretrained(models["qwen3-tied"]).save_pretrained(path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def updated(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda model: edit(model / name, lambda data: data.update(values))


def shards(model: Path) -> list[Path]:
    found = sorted(model.glob("*.safetensors"))
    assert len(found) > 1
    return found


STATE = {"format": 2, "state": "own", "ranks": 2, "step": 3, "steps": {}}
HALVES = [{"weight|w|0,0": torch.ones(2, 3), "exp_avg|w|0,0": torch.ones(2, 3)}, {"weight|w|2,0": torch.ones(1, 3)}]


@pytest.mark.parametrize(
    ("about", "files", "says"),
    [
        ({}, [{}, {}], "it lacks exp_avg of w"),  # nothing is wrong with it but that
        ({}, [{}, None], "rank-00001.safetensors is missing or cut off"),
        ({}, [{}, {"weight|w|2,0": None, "weight|w|3,0": torch.ones(1, 3)}], "some of weight of w is missing"),
        ({}, [{}, {"weight|w|2,0": None, "weight|w|-2,0": torch.ones(1, 3)}], "begins before its first element"),
        ({}, [{}, {"weight|w|2": torch.ones(1, 3)}], "damaged"),
        ({}, [{}, {"weight|w|x,y": torch.ones(1, 3)}], "damaged"),
        ({}, [{}, {"weight|v|w|0": torch.ones(1)}], "unexpected keys v|w"),
        ({}, [{}, {"weight|scalar|": torch.ones(())}], "unexpected keys scalar"),
        ({"state": "another"}, [{}, {}], "rank-00000.safetensors is of another state"),
        ({"ranks": float("inf")}, [{}, {}], "damaged"),
        ({"step": 10**40}, [{}, {}], "after"),
        ({"step": -1}, [{}, {}], "after -1 steps"),
        ({"format": 1}, [{}, {}], "its format is 1, not 2"),
        ({"steps": []}, [{}, {}], "damaged"),
    ],
)
def test_a_damaged_state_or_one_of_another_optimizer_is_refused_in_words_before_anything_is_read(
    tmp_path: Path, about: dict[str, Any], files: list[dict[str, torch.Tensor | None] | None], says: str
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({**STATE, **about}))
    for rank, (half, change) in enumerate(zip(HALVES, files, strict=True)):
        if change is not None:
            tensors = {key: tensor for key, tensor in {**half, **change}.items() if tensor is not None}
            save_file(tensors, tmp_path / f"rank-0000{rank}.safetensors", {"state.json": "own"})
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_state(tmp_path, {"w": (3, 3)}, {"w": ["exp_avg"]})


def test_a_good_directory_is_described(template: Path) -> None:
    info = check_model_dir(template)
    assert (info.architecture, info.vocab_size, info.path) == ("Qwen3ForCausalLM", VOCAB, template)
    assert info.eos_token_ids == (3, 5)
    assert info.config["head_dim"] == 8


def remove_weights(model: Path) -> None:
    for path in [*shards(model), model / "model.safetensors.index.json"]:
        path.unlink()


def remove_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def forget_eos(model: Path) -> None:
    edit(model / "tokenizer_config.json", lambda data: data.pop("eos_token"))
    edit(model / "config.json", lambda data: data.update(eos_token_id=None))
    edit(model / "generation_config.json", lambda data: data.pop("eos_token_id"))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing directory": (shutil.rmtree, "there is no model directory"),
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json"),
    "config not JSON": (lambda m: (m / "config.json").write_text("{"), "config.json is not valid JSON"),
    "config without a type": (lambda m: edit(m / "config.json", lambda d: d.pop("model_type")), "names no model_type"),
    "config with bad values": (updated("config.json", num_hidden_layers="two"), "transformers refuses"),
    "not a language model": (
        updated("config.json", architectures=["Qwen3ForSequenceClassification"]),
        "Qwen3ForSequenceClassification, which transformers does not know as a causal language model",
    ),
    "unknown architecture": (
        updated("config.json", model_type="mine", architectures=["MineForCausalLM"]),
        "holds a MineForCausalLM, which transformers does not know",
    ),
    "architectures no list": (updated("config.json", architectures="Qwen3ForCausalLM"), "are no list of names"),
    "an architecture no name": (updated("config.json", architectures=[["Qwen3ForCausalLM"]]), "are no list of names"),
    "another name": (updated("config.json", model_type="kimi_k2"), "the same model as deepseek_v3"),
    "no weights": (remove_weights, "holds no weights"),
    "truncated weights": (
        lambda m: shards(m)[0].write_bytes(shards(m)[0].read_bytes()[:-10]),
        "it is truncated or damaged",
    ),
    "absurd header length": (
        lambda m: shards(m)[0].write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        "not a safetensors file",
    ),
    "unknown dtype": (
        lambda m: shards(m)[0].write_bytes(shards(m)[0].read_bytes().replace(b'"F32"', b'"U32"')),
        "has the dtype U32, which is not known",
    ),
    "missing shard": (lambda m: shards(m)[1].unlink(), "lacks the weights file"),
    "index out of the folder": (
        updated("model.safetensors.index.json", weight_map={"x": "../index out of the folder/config.json"}),
        "lacks the weights file ../index out of the folder/config.json",
    ),
    "index names a tensor that is not there": (
        lambda m: edit(m / "model.safetensors.index.json", lambda d: d["weight_map"].update(ghost=shards(m)[0].name)),
        "places ghost in",
    ),
    "no tokenizer": (remove_tokenizer, "has no tokenizer"),
    "broken tokenizer": (lambda m: (m / "tokenizer.json").write_text("{}"), "the tokenizer in .* cannot be loaded"),
    "tokenizer too large": (
        lambda m: edit(m / "tokenizer.json", lambda d: d["model"]["vocab"].update({"huge": VOCAB})),
        f"token 'huge' has id {VOCAB}, but the model's vocab_size is {VOCAB}",
    ),
    "end token outside": (
        updated("generation_config.json", eos_token_id=[5, 77]),
        f"the model ends on token 77, outside its vocab_size {VOCAB}",
    ),
    "end token no id": (updated("generation_config.json", eos_token_id="</s>"), "eos_token_id '</s>', which is no id"),
    "no end token": (forget_eos, "names an end-of-sequence token"),
}


def test_a_broken_directory_is_refused_in_words(template: Path, tmp_path: Path) -> None:
    for case, (damage, problem) in BROKEN.items():
        damage(model := shutil.copytree(template, tmp_path / case))
        with pytest.raises(ConfigError, match=problem):
            check_model_dir(model)


def test_a_name_that_is_no_directory_is_looked_for_in_the_cache_and_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match="there is no model directory nobody/nothing, and a model of this name can be"
    ):
        find_model("nobody/nothing")
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(revision)
    (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "snapshots" / revision / "config.json").write_text("{}")
    assert find_model("some/model") == cached / "snapshots" / revision
    (tmp_path / "some").mkdir()
    assert find_model(tmp_path / "some") == tmp_path / "some"
    monkeypatch.chdir(tmp_path)
    for path in ("nowhere", "./nowhere", "/nowhere/at/all", "models/of/mine", "some/model"):
        assert find_model(path) == Path(path), "no name that the hub could have, or in a directory that is here"


def test_the_tokenizers_chat_template_makes_the_prompt(models: dict[str, Path], tmp_path: Path) -> None:
    chat = shutil.copytree(models["qwen3-tied"], tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
    (chat / "chat_template.jinja").write_text(template)
    assert HfTokenizer(chat).as_chat([{"role": "user", "content": "1+1="}]) == "[user]1+1=[answer]"


def test_ranks_export_files_of_their_own_and_need_no_more_memory_than_a_round(
    teams: Teams, models: dict[str, Path], tmp_path: Path
) -> None:
    """Every allocation is on record, where a round has 1 MiB, the largest tensors 2 MiB, and the model 24."""
    wide, out, left = tmp_path / "wide", tmp_path / "out", tmp_path / ".out.partial"
    shutil.copytree(models["qwen3-tied"], wide)
    config = AutoConfig.from_pretrained(wide, intermediate_size=1 << 15)
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    left.mkdir()
    (left / "model-00001-of-00001.safetensors").write_text("left by an export that was killed")
    ranks = teams.of(2)
    ranks.all("setup", model=wide, trainer=TRAINER)
    ranks.all("export", directory=out, record=tmp_path / "RANK.bin")
    assert [path.name for path in shards(out)] == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert not left.exists()
    for rank in range(2):
        with memray.FileReader(tmp_path / f"{rank}.bin") as reader:
            assert 1 << 19 <= reader.metadata.peak_memory <= (2 << 20) + (4 << 20), "two rounds, and Python's objects"


def test_an_export_in_which_a_rank_dies_or_sees_another_directory_names_it_and_leaves_nothing(
    teams: Teams, tmp_path: Path
) -> None:
    apart, new = tmp_path / "of-RANK" / "new", tmp_path / "new"
    with teams.new(3) as ranks:
        ranks.setup("qwen3-tied")
        for says in ("does not see the directory", "/.new.partial, which trainer rank 0 made on node-0"):
            ranks.all_fail("ConfigError", says, "export", directory=apart, host="node-RANK")
        for rank in range(3):
            ranks.tell(rank, "export", directory=new, dies_in=3 if rank == 2 else -1)
        for answer in (ranks.answer(0), ranks.answer(1)):
            assert answer["error"] == "PeerLostError", answer
            assert "trainer rank 2" in answer["message"]
    assert not [path for path in tmp_path.rglob("*") if path.name not in {"of-0", "of-1", "of-2"}]


def test_a_rank_that_does_not_come_in_time_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(rank_rounds, "_get_default_store", lambda: store)
    monkeypatch.setattr(rank_rounds, "share_json", lambda value, _: [value, value])
    for rank, deadline_s in ((0, 0.1), (1, NEVER_S)):
        with rank_rounds.RankRounds(rank, 2, torch.device("cpu"), deadline_s, "write its part") as ranks:
            ranks.begin("export", None)
            with pytest.raises(DeadlineExceededError, match=r"no answer of trainer rank 1 within 0\.1 s"):
                ranks.enter()
