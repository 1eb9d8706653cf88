"""The head in chunks, against torch's softmax over whole logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, Qwen3Config

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.batch import IGNORED
from weightlane.trainer.engines.head import LogitTransform, head_outputs
from weightlane.trainer.engines.head.chunks import LEAST_ROWS
from weightlane.trainer.engines.head.top_tokens import best_keys, unpacked
from weightlane.trainer.engines.hf.causal_head import HeadQuery, replace_head

ROWS, WIDTH, VOCAB = 3 * LEAST_ROWS + 5, 16, 61


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(2.0, 5.0)])
@pytest.mark.parametrize("labels", [(), (3,)])
@pytest.mark.parametrize("further", [True, False], ids=["bias and temperatures", "plain"])
def test_values_and_gradients_in_chunks_are_those_of_whole_logits(
    transform: LogitTransform, labels: tuple[int, ...], further: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH)
    bias, temperatures = (torch.randn(VOCAB), torch.rand(ROWS) + 0.5) if further else (None, None)
    targets = torch.randint(VOCAB, (ROWS, *labels))
    targets[::7] = IGNORED
    by_logprob, by_entropy = torch.randn(targets.shape), torch.randn(ROWS)

    def leaves(dtype: torch.dtype) -> list[torch.Tensor]:
        return [each.to(dtype, copy=True).requires_grad_() for each in (hidden, weight, bias) if each is not None]

    exact = leaves(torch.float64)
    logits = transform(torch.nn.functional.linear(*exact))
    logs = torch.log_softmax(logits if temperatures is None else logits / temperatures[:, None].double(), -1)
    chosen = logs.gather(1, targets.clamp(min=0).view(ROWS, -1)).view(targets.shape)
    wanted = torch.where(targets != IGNORED, chosen, 0.0), -(logs.exp() * logs).sum(1)
    ((wanted[0] * by_logprob).sum() + (wanted[1] * by_entropy).sum()).backward()

    mine = leaves(torch.float32)
    found = head_outputs(
        mine[0],
        mine[1],
        targets,
        entropy=True,
        bias=mine[2] if further else None,
        temperatures=temperatures,
        transform=transform,
        chunk_bytes=1,
    )
    values = found.logprobs, found.entropy
    assert [each.dtype for each in values] == [torch.float32] * 2
    assert found.top_tokens.shape == found.top_logprobs.shape == (ROWS, 0), "none were asked for"
    ((found.logprobs * by_logprob).sum() + (found.entropy * by_entropy).sum()).backward()
    for got, expected in zip(values, wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-6)
    for left, right in zip(mine, exact, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert float((left.grad - right.grad).norm() / right.grad.norm()) <= 1e-6
    alone = head_outputs(
        mine[0], mine[1], targets, bias=mine[2] if further else None, temperatures=temperatures, transform=transform
    )
    torch.testing.assert_close(alone.logprobs, found.logprobs, atol=1e-6, rtol=1e-6)
    assert not bool(alone.entropy.any()), "no entropy was asked for"


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(2.0, 5.0)])
@pytest.mark.parametrize("count", [1, 5, VOCAB])
def test_the_most_probable_tokens_are_those_of_whole_logits(transform: LogitTransform, count: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(ROWS, WIDTH), torch.randn(VOCAB, WIDTH), torch.randn(VOCAB)
    temperatures, targets = torch.rand(ROWS) + 0.5, torch.randint(VOCAB, (ROWS,))
    logits = transform(torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()))
    wanted = torch.log_softmax(logits / temperatures[:, None].double(), -1).topk(count)
    leaf = hidden.clone().requires_grad_()
    asked: dict[str, Any] = {"bias": bias, "temperatures": temperatures, "transform": transform, "chunk_bytes": 1}
    found = head_outputs(leaf, weight, targets, top_k=count, **asked)
    torch.testing.assert_close(found.top_logprobs.double(), wanted.values, atol=1e-5, rtol=1e-6)
    if count < VOCAB:  # the least probable ones may be less than a float32 apart, and in another order
        assert torch.equal(found.top_tokens, wanted.indices)
    assert found.top_tokens.sort(1).values.diff(dim=1).all(), "each token once"
    assert not found.top_logprobs.requires_grad
    found.logprobs.sum().backward()
    with_them = leaf.grad
    leaf.grad = None
    head_outputs(leaf, weight, targets, **asked).logprobs.sum().backward()
    assert torch.equal(leaf.grad, with_them), "asking for them changes no gradient"


def test_of_equally_probable_tokens_the_lower_comes_first() -> None:
    """Also of -0.0 and 0.0, which are equal."""
    logits = torch.tensor([[1.0, -0.0, 3.0, 0.0, 3.0, -2.0, 1.0], [-4.0, -2.0, -4.0, -9.0, -4.0, -2.0, -4.0]])
    found = head_outputs(torch.eye(2), logits.T.contiguous(), torch.zeros(2, dtype=torch.int64), top_k=6)
    assert found.top_tokens.tolist() == [[2, 4, 0, 6, 1, 3], [1, 5, 0, 2, 4, 6]]
    keys = best_keys(logits, 7)
    assert keys.diff(dim=1).lt(0).all()
    assert unpacked(keys)[0].tolist() == [[2, 4, 0, 6, 1, 3, 5], [1, 5, 0, 2, 4, 6, 3]]


def test_more_tokens_than_the_vocabulary_has_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="top_k is 8"):
        head_outputs(torch.eye(2), torch.eye(7, 2), torch.zeros(2, dtype=torch.int64), top_k=8)


def test_no_row_is_a_micro_batch_whose_gradient_is_zero() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    head_outputs(hidden, weight, torch.zeros(0, dtype=torch.int64)).logprobs.sum().backward()
    assert weight.grad is not None
    assert not bool(weight.grad.any())


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES),
        Gemma2Config(**SIZES, final_logit_softcapping=2.0),
        CohereConfig(**SIZES, logit_scale=0.25),
        GraniteConfig(**SIZES, logits_scaling=3.0),
    ],
    ids=lambda config: type(config).__name__,
)
def test_log_probabilities_are_those_of_the_models_own_logits(config: Any) -> None:
    """Whatever the architecture does with its logits: a factor, a soft cap, nothing."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        logs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits.double(), -1).flatten(0, 1)
        replace_head(model)
        rows, labels = torch.tensor([0, 3, 10, 17]), torch.tensor([1, 2, 3, 4])
        found = model(HeadQuery(rows, labels, top_k=2), input_ids=tokens)
    torch.testing.assert_close(found["logprobs"].double(), logs[rows, labels], atol=1e-5, rtol=0)
    assert torch.equal(found["top_tokens"], logs[rows].topk(2).indices)


def test_a_model_that_does_something_else_with_its_logits_or_has_no_head_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).eval()
    run = model.forward

    def squared(**inputs: Any) -> Any:
        output = run(**inputs)
        output.logits = output.logits.square()
        return output

    model.forward = squared
    replace_head(model)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="neither a factor nor a soft cap"):
        model(HeadQuery(one, one), input_ids=one[None])
    headless = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    headless.lm_head = None
    with pytest.raises(ConfigError, match="no linear head"):
        replace_head(headless)
