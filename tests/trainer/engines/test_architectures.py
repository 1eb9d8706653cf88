"""The fsdp2 engine's loading and log-probabilities, for every architecture of the zoo, against transformers' own."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from engine_ranks import Teams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
from zoo_kind import VOCAB, Kind, make
from zoo_models import KINDS as KINDS_BY_NAME
from zoo_models import ZOO

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.data.sequences import MicroBatch, TokenSequence
from weightlane.trainer.engines.fsdp2.loading import materialise
from weightlane.trainer.engines.fsdp2.shards import trained_slices
from weightlane.trainer.engines.head import PassQuery
from weightlane.trainer.engines.hf import checkpoint
from weightlane.trainer.engines.hf.context_split import check_context
from weightlane.trainer.engines.hf.heads import HeadQuery, read_values, replace_head, value_head
from weightlane.trainer.engines.hf.layout import Layout
from weightlane.trainer.engines.hf.packed_attention import can_pack, pack_attention

PROMISED = {
    "llama-biases",
    "qwen3-tied",
    "gemma3",
    "gpt2",
    "gptj",
    "falcon",
    "gpt-oss",
    "deepseek-v3",
    "mamba",
    "qwen3-next",
}
"""One architecture of each kind of attention and of head, with and without experts; the others run in `make test-all`."""
KINDS = [
    pytest.param(kind, id=kind.name, marks=[pytest.mark.exhaustive] * (kind.name not in PROMISED))
    for kind in ZOO
    if kind.backend == "vllm" and kind.group != "pooling"
]
PADDED = {"gptj", "bloom", "falcon", "falcon-new", "stablelm", "nemotron"}
"""Architectures that cannot take packed sequences, beside those with layers that are no attention."""
LENGTHS = (45, 1, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_log_probabilities_and_values_are_those_of_transformers(kind: Kind, tmp_path: Path) -> None:
    path = make(kind, tmp_path / "model", seed=0, dtype=torch.float32)
    check_policy(kind, path)
    check_critic(path)


def fill(model: torch.nn.Module, path: Path, head: str) -> None:
    """Nothing in the files has to be converted."""
    runs = checkpoint.checkpoint_runs(model, checkpoint.checkpoint_tensors(model))
    shapes = {run.name: run.shape for run in runs}
    assert checkpoint.stored_weights(model, path, head, shapes) is not None
    materialise(model, torch.device("cpu"))
    checkpoint.weights_reader(path, head, shapes)(trained_slices(runs, checkpoint.checkpoint_tensors(model), {}))


def check_policy(kind: Kind, path: Path) -> None:
    """Weights are those of an ordinary load, and log-probabilities those of whole logits."""
    ordinary = getattr(transformers, kind.model or f"{kind.config}ForCausalLM").from_pretrained(path).eval()
    model = checkpoint.model_without_weights(path)
    packs = can_pack(model)
    shared = TrainerConfig(ranks=2, fsdp2={"context_parallel": 2})
    with nullcontext() if packs else pytest.raises(ConfigError, match="context_parallel is 2, which needs packed"):
        check_context(shared, model)
    fill(model, path, "tokens")
    for left, right in (
        (model.named_parameters(), ordinary.named_parameters()),
        (model.named_buffers(), ordinary.named_buffers()),
    ):
        mine, theirs = dict(left), dict(right)
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []

    if packs:
        pack_attention(model)
    assert packs is (kind.name not in PADDED and kind.group not in {"state space", "hybrid"})
    replace_head(model)
    random_of = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCAB, (length + 1,), generator=random_of) for length in LENGTHS]
    micro = MicroBatch.of([TokenSequence(tokens[:-1], tokens[1:]) for tokens in drawn])
    layout = Layout.packed([micro], share=True) if packs else Layout.padded(micro)
    if packs:
        assert torch.equal(layout.inputs["input_ids"][0], micro.tokens), "they share nothing, so nothing changes"
        assert torch.equal(layout.places, torch.arange(len(micro.tokens)))
    with torch.no_grad():
        found = model(
            HeadQuery(PassQuery(torch.arange(len(micro.tokens)), entropy=True), micro, layout.places), **layout.inputs
        )
        logprobs, entropies = (micro.split(found[name]) for name in ("logprobs", "entropy"))
        for tokens, mine, spread in zip(drawn, logprobs, entropies, strict=True):
            logs = torch.log_softmax(ordinary(input_ids=tokens[None, :-1], use_cache=False).logits[0].float(), -1)
            torch.testing.assert_close(mine, logs[range(len(mine)), tokens[1:]], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(spread, -(logs.exp() * logs).sum(1), atol=1e-5, rtol=1e-5)
    if packs:
        check_shared_prefixes(model, ordinary)


def check_shared_prefixes(model: torch.nn.Module, ordinary: torch.nn.Module) -> None:
    """Hidden states, log-probabilities and gradients are transformers', whose float64 computes each sequence by itself.

    Two groups: nothing follows a prefix, one token does, two sequences are equal, and one is twice as long as the others.
    """
    model.requires_grad_()
    random_of = torch.Generator().manual_seed(2)
    first, second, *rests = (torch.randint(3, VOCAB, (size,), generator=random_of) for size in (20, 17, 1, 9, 25, 4))
    trees = [
        (first, rests[0][:0]),
        *((first, rest) for rest in rests[:3]),
        (first, rests[1]),
        *((second, rest) for rest in rests),
    ]
    targets = [torch.randint(3, VOCAB, (len(prefix) + len(rest),), generator=random_of) for prefix, rest in trees]
    sequences = [TokenSequence(torch.cat(parts), target) for parts, target in zip(trees, targets, strict=True)]
    micro = MicroBatch.of([sequences[row] for row in (3, 8, 0, 5, 1, 2, 7, 4, 6)])
    layout = Layout.packed([micro], share=True)
    assert layout.counts == (20 + 1 + 9 + 25 + 9 + 17 + 1 + 9 + 25 + 4,)
    weights = torch.randn(len(micro.tokens), generator=random_of)
    query = HeadQuery(PassQuery(torch.arange(len(micro.tokens)), hidden=True), micro, layout.places)
    found = model(query, **layout.inputs)
    (found["logprobs"] * weights).sum().backward()
    ordinary.double().set_experts_implementation("eager")  # type: ignore[operator]  # of transformers' PreTrainedModel
    read: list[torch.Tensor] = []
    head = ordinary.get_output_embeddings()  # type: ignore[operator]  # as above
    head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    parts = zip(
        micro.split(micro.tokens),
        micro.split(micro.targets),
        *(micro.split(found[name]) for name in ("logprobs", "hidden")),
        micro.split(weights),
        strict=True,
    )
    for tokens, target, logprobs, hidden, weight in parts:
        exact = ordinary(input_ids=tokens[None], use_cache=False)
        wanted = torch.log_softmax(exact.logits[0], -1)[range(len(target)), target]
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(hidden.double(), read.pop()[0], atol=2e-5, rtol=1e-5)
        (wanted * weight).sum().backward()
    theirs = dict(ordinary.named_parameters())
    pairs = [(each.grad, theirs[name].grad) for name, each in model.named_parameters() if theirs[name].grad is not None]
    difference, size = (
        sum(float(each.double().square().sum()) for each in grads)
        for grads in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    assert difference**0.5 < 1e-5 * size**0.5, (difference / size) ** 0.5


CONTEXT = ("gemma2", "qwen3-tied", "gpt-oss")
"""Sliding windows and soft caps, which `make test` has; attention by torch's function, as in `test_fsdp2`; sinks and experts."""
FURTHER = ("gpt2", "opt", "ministral3", "phimoe", "starcoder", "cohere", "gemma3n", "gemma4", "deepseek-v3")
"""Architectures with other parts that a split row could break: learned positions, scores and rotations by position, one head of
keys, scaled logits, embeddings of each layer, keys of other layers, keys wider than values. All packing is tested above."""
LIMITS = {"hidden": 1e-5, "entropy": 1e-5}
"""Largest differences of what is computed in float32, and not the mean of many."""


@pytest.mark.parametrize(
    ("names", "world"),
    [
        pytest.param(CONTEXT[:1], 2, id="attention"),
        pytest.param(CONTEXT[1:], 2, marks=pytest.mark.exhaustive, id="further attention"),
        pytest.param(CONTEXT, 4, marks=pytest.mark.exhaustive, id="attention, of four"),
        pytest.param(FURTHER, 2, marks=pytest.mark.exhaustive, id="further parts of models"),
    ],
)
def test_ranks_that_share_a_row_compute_what_transformers_does_alone(
    teams: Teams, tmp_path: Path, names: tuple[str, ...], world: int
) -> None:
    """Each sequence by itself, in float64; here the head, and the softmax of some attentions, are float32."""
    for name in names:
        kind = KINDS_BY_NAME[name]
        path = make(kind, tmp_path / name, seed=0, dtype=torch.float32)
        asked = {"model": path, "vocabulary": VOCAB, "kind": kind.model or f"{kind.config}ForCausalLM"}
        found = teams.of(world).all("share_rows", **asked)[0]
        assert found
        assert not {what: off for what, off in found.items() if not off < LIMITS.get(what, 1e-6)}, name


def check_critic(path: Path) -> None:
    """A critic, whose body is that of the policy, computes transformers' values, or the error says that transformers has none."""
    kept = json.loads((path / "config.json").read_text())["model_type"]
    if kept not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        with pytest.raises(ConfigError, match=r"trainer\.head=value"):
            checkpoint.model_without_weights(path, "value")
        return
    ordinary = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    model = checkpoint.model_without_weights(path, "value")
    fill(model, path, "value")
    assert not any(parameter.any() for parameter in value_head(model)[1].parameters())
    for mine, theirs in zip(value_head(model)[1].parameters(), value_head(ordinary)[1].parameters(), strict=True):
        mine.data.copy_(theirs)
    rows, tokens = torch.tensor([0, 3, 6]), torch.randint(3, VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = ordinary(tokens, use_cache=False).logits[0, rows, 0]
        read_values(model)
        query = HeadQuery(PassQuery(rows), MicroBatch.of([TokenSequence(tokens[0], tokens[0])]), torch.arange(7))
        torch.testing.assert_close(model(query, input_ids=tokens)["values"], wanted, atol=1e-5, rtol=1e-5)
    assert wanted.any()


def test_attention_by_a_mask_or_a_bias_of_the_models_own_is_not_packed(tmp_path: Path) -> None:
    """It would be ignored: the log-probabilities would be wrong, and nobody told."""
    model = checkpoint.model_without_weights(
        make(KINDS_BY_NAME["qwen3"], tmp_path / "model", seed=0, dtype=torch.float32)
    )
    assert can_pack(model)
    for extra in ("attention_mask", "position_bias"):
        biased = copy.deepcopy(model)
        attention = biased.model.layers[0].self_attn
        attention.register_forward_pre_hook(
            lambda _, args, rest, name=extra: (args, {**rest, name: torch.ones(1, 1, 2, 2, device="meta")}),
            with_kwargs=True,
        )
        assert not can_pack(biased)
    kinds = ["full_attention", "sliding_attention"]
    moe = transformers.Qwen2MoeConfig(use_sliding_window=True, num_hidden_layers=2, layer_types=kinds)
    for windowed in (moe, transformers.PhimoeConfig(sliding_window=4, num_hidden_layers=1)):
        with torch.device("meta"):
            assert not can_pack(transformers.AutoModelForCausalLM.from_config(windowed))


def test_a_checkpoint_in_another_form_than_models_are_saved_in_is_loaded_by_transformers(tmp_path: Path) -> None:
    """Here, as some are on the hub, without the prefix of the model inside."""
    path = make(KINDS_BY_NAME["llama-tied"], tmp_path / "model", seed=0, dtype=torch.float32)
    weights = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, path / "model.safetensors", {"format": "pt"})
    model = checkpoint.model_without_weights(path)
    runs = checkpoint.checkpoint_runs(model, checkpoint.checkpoint_tensors(model))
    shapes = {run.name: run.shape for run in runs}
    assert checkpoint.stored_weights(model, path, "tokens", shapes) is None
    materialise(model, torch.device("cpu"))
    held = checkpoint.checkpoint_tensors(model)
    checkpoint.weights_reader(path, "tokens", shapes)(trained_slices(runs, held, {}))
    assert [name for name, tensor in weights.items() if not torch.equal(held[name], tensor)] == []
