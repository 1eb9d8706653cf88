"""The head in chunks, against torch's softmax over whole logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, Qwen3Config

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.batch import IGNORED
from weightlane.trainer.engines.head import LEAST_ROWS, LogitTransform, head_outputs
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
    assert [each.dtype for each in found] == [torch.float32] * 2
    ((found[0] * by_logprob).sum() + (found[1] * by_entropy).sum()).backward()
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-6)
    for left, right in zip(mine, exact, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert float((left.grad - right.grad).norm() / right.grad.norm()) <= 1e-6
    alone, none = head_outputs(
        mine[0], mine[1], targets, bias=mine[2] if further else None, temperatures=temperatures, transform=transform
    )
    torch.testing.assert_close(alone, found[0], atol=1e-6, rtol=1e-6)
    assert not bool(none.any()), "no entropy was asked for"


def test_no_row_is_a_micro_batch_whose_gradient_is_zero() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    logprobs, _ = head_outputs(hidden, weight, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
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
        logprobs = model(HeadQuery(rows, labels), input_ids=tokens)["logprobs"]
    torch.testing.assert_close(logprobs.double(), logs[rows, labels], atol=1e-5, rtol=0)


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
