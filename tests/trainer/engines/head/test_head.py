"""The head in chunks, against torch's softmax over whole logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_oracle import Case, compare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, Qwen3Config

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.sequences import MicroBatch, TokenSequence
from weightlane.trainer.engines.head import LogitTransform, PassQuery, head_outputs
from weightlane.trainer.engines.head.chunks import LEAST_ROWS
from weightlane.trainer.engines.head.top_tokens import best_keys, unpacked
from weightlane.trainer.engines.hf.heads import HeadQuery, replace_head

ROWS, WIDTH, VOCAB = 3 * LEAST_ROWS + 5, 16, 61


def test_values_gradients_and_top_tokens_in_chunks_are_those_of_whole_logits() -> None:
    """Logits of some hundreds neither overflow nor lose all digits; they lie 6e-5 apart in float32."""
    capped = LogitTransform(2.0, 5.0)
    for case in (
        Case(ROWS, WIDTH, VOCAB, (), LogitTransform(), further=True, entropy=True, top_k=1, chunk_bytes=1),
        Case(ROWS, WIDTH, VOCAB, (3,), LogitTransform(0.3), further=False, entropy=True, top_k=5, chunk_bytes=1),
        Case(ROWS, WIDTH, VOCAB, (3,), capped, further=True, entropy=True, top_k=VOCAB, chunk_bytes=1),
        Case(ROWS, WIDTH, VOCAB, (3,), capped, further=True, entropy=False, top_k=0),  # one chunk
        Case(0, WIDTH, VOCAB, (), LogitTransform(), further=False, entropy=False, top_k=0),
    ):
        compare(case, "cpu", torch.float32)
    large = Case(ROWS, WIDTH, VOCAB, (), LogitTransform(50.0), further=False, entropy=True, top_k=3, chunk_bytes=1)
    compare(large, "cpu", torch.float32, values=2e-4, slopes=2e-4)


def test_of_equally_probable_tokens_the_lower_comes_first() -> None:
    """Also of -0.0 and 0.0, which are equal."""
    logits = torch.tensor([[1.0, -0.0, 3.0, 0.0, 3.0, -2.0, 1.0], [-4.0, -2.0, -4.0, -9.0, -4.0, -2.0, -4.0]])
    found = head_outputs(torch.eye(2), logits.T.contiguous(), torch.zeros(2, dtype=torch.int64), top_k=6)
    assert found.top_tokens.tolist() == [[2, 4, 0, 6, 1, 3], [1, 5, 0, 2, 4, 6]]
    keys = best_keys(logits, 7)
    assert keys.diff(dim=1).lt(0).all()
    assert unpacked(keys)[0].tolist() == [[2, 4, 0, 6, 1, 3, 5], [1, 5, 0, 2, 4, 6, 3]]


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


def test_log_probabilities_are_those_of_the_models_own_logits() -> None:
    """Whatever the architecture does with its logits: a factor, a soft cap, nothing."""
    rows = torch.tensor([0, 3, 10, 17])
    for config in (
        Qwen3Config(**SIZES),
        Gemma2Config(**SIZES, final_logit_softcapping=2.0),
        CohereConfig(**SIZES, logit_scale=0.25),
        GraniteConfig(**SIZES, logits_scaling=3.0),
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.randint(VOCAB, (2, 9))
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits.double(), -1).flatten(0, 1)
            replace_head(model)
            micro = MicroBatch.of([TokenSequence(each, each) for each in tokens])
            found = model(HeadQuery(PassQuery(rows, top_k=2), micro, torch.arange(18)), input_ids=tokens)
        torch.testing.assert_close(found["logprobs"].double(), logs[rows, tokens.flatten()[rows]], atol=1e-5, rtol=0)
        assert torch.equal(found["top_tokens"], logs[rows].topk(2).indices)


def test_temperatures_are_float32_where_fsdp_computes_in_half_precision() -> None:
    """0.7 in bfloat16 is 0.6992, which would move ratios between the trainer's and the rollout's log-probabilities."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).eval()
        replace_head(model)
        run, asked = model.forward, []
        model.forward = lambda query, **inputs: asked.append(query) or run(query, **inputs)
        fully_shard(
            model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        )
        tokens = torch.arange(9)
        micro = MicroBatch.of([TokenSequence(tokens, tokens, per_sequence={"temperature": 0.7})])
        model(HeadQuery(PassQuery(tokens), micro, tokens), input_ids=tokens[None])
    finally:
        dist.destroy_process_group()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(asked[0].micro.temperatures, torch.full((9,), 0.7))


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
        model(HeadQuery(PassQuery(one), MicroBatch.of([TokenSequence(one, one)]), one), input_ids=one[None])
    headless = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    headless.lm_head = None
    with pytest.raises(ConfigError, match="no linear head"):
        replace_head(headless)
