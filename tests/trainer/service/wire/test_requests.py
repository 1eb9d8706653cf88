"""Requests as the SDK itself writes them are read; wrong ones raise `ProtocolError` alone, which names the field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import tinker.types as sdk
from fuzzing import mutated, mutated_bytes
from hypothesis import given
from hypothesis import strategies as st
from tinker._compat import model_dump
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.sample_request import SampleRequest
from tinker.types.save_weights_external_request import SaveWeightsExternalRequest
from tinker.types.save_weights_for_sampler_request import SaveWeightsForSamplerRequest

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer.service.wire import requests, sampling_requests
from weightlane.trainer.service.wire.bodies import decompressed
from weightlane.trainer.service.wire.requests import Request, request

PATH = "tinker://s:train:0/weights/step-10"
SAMPLER_PATH = "tinker://s:train:0/sampler_weights/step-10"
PROMPT = sdk.ModelInput.from_ints([1, 2, 3])

WRITTEN: list[Any] = [
    sdk.CreateSessionRequest(tags=["a"], user_metadata={"note": 1}, sdk_version="0.38.0", project_id="p"),
    sdk.SessionHeartbeatRequest(session_id="s"),
    sdk.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="Qwen/Qwen3-8B", lora_config=sdk.LoraConfig(rank=32)
    ),
    sdk.CreateModelRequest(session_id="s", model_seq_id=1, base_model="Qwen/Qwen3-8B", user_metadata={"run": "x"}),
    sdk.GetInfoRequest(model_id="s:train:0"),
    sdk.OptimStepRequest(
        optim_params=sdk.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0), model_id="s:train:0", seq_id=2
    ),
    sdk.SaveWeightsRequest(model_id="s:train:0", path="step-10", seq_id=3, ttl_seconds=3600, user_metadata={"a": "b"}),
    LoadWeightsRequest(model_id="s:train:0", seq_id=1, path=PATH, optimizer=True),
    LoadWeightsRequest(
        session_id="s", model_seq_id=0, path=PATH, optimizer=False, optimizer_config=sdk.AdamOptimizerConfig()
    ),
    SaveWeightsExternalRequest(model_id="s:train:0", path="step-10", seq_id=4, ttl_seconds=3600),
    SaveWeightsForSamplerRequest(model_id="s:train:0", path="step-10", seq_id=4),
    SaveWeightsForSamplerRequest(model_id="s:train:0", sampling_session_seq_id=0, seq_id=4, kind="inflight"),
    CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=0, model_path=SAMPLER_PATH),
    CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=1, base_model="Qwen/Qwen3-8B"),
    JoinSamplingSessionRequest(sampling_session_id="s:sample:0"),
    SampleRequest(
        prompt=PROMPT, sampling_params=sdk.SamplingParams(), sampling_session_id="s:sample:0", seq_id=3_000_000_000
    ),
    SampleRequest(
        num_samples=4,
        prompt=PROMPT,
        sampling_params=sdk.SamplingParams(
            max_tokens=5, seed=2**64 - 1, stop=["\n"], temperature=0, top_k=5, top_p=0.5
        ),
        model_path=SAMPLER_PATH,
        prompt_logprobs=True,
        topk_prompt_logprobs=5,
        topk_sample_logprobs=2,
        prompt_logprobs_last_n=2,
        record_stability_info=False,
    ),
    sdk.FutureRetrieveRequest(request_id="r-1", allow_metadata_only=True),
    sdk.UnloadModelRequest(model_id="s:train:0"),
]


def kind_of(name: str) -> type[Request]:
    found: type[Request] = getattr(requests, name, None) or getattr(sampling_requests, name)
    return found


def body_of(written: Any) -> dict[str, Any]:
    """The JSON that the SDK sends."""
    found: dict[str, Any] = model_dump(written, exclude_unset=False, exclude_none=True, mode="json")
    return found


def assert_holds(found: Any, sent: dict[str, Any]) -> None:
    for name, value in sent.items():
        if isinstance(value, dict) and isinstance(getattr(found, name, None), Request):
            assert_holds(getattr(found, name), value)
        elif name == "chunks":
            assert [each.tokens for each in found.chunks] == [each["tokens"] for each in value]
        elif name != "type":
            assert getattr(found, name) == value, name


def test_requests_of_the_sdk_are_read_also_with_fields_of_a_newer_one() -> None:
    for written in WRITTEN:
        sent, kind = body_of(written), kind_of(type(written).__name__)
        assert_holds(request(kind, json.dumps(sent).encode()), sent)
        assert_holds(request(kind, json.dumps({**sent, "newer_field": {"a": [1]}}).encode()), sent)


def test_settings_of_a_sample_say_what_ends_it_and_each_sample_has_a_seed_of_its_own() -> None:
    for stop, strings, tokens in (
        (None, [], None),
        ("end", ["end"], None),
        (["a", "b"], ["a", "b"], None),
        ([5, 6], [], [5, 6]),
        ([], [], []),
    ):
        found = sampling_requests.SamplingParams(stop=stop)
        assert (found.stop_strings, found.stop_tokens) == (strings, tokens)
    drawn = {
        sampling_requests.SamplingParams(seed=seed).seed_of(sample)
        for seed in (-1, 0, 42, 43, 2**64 - 1)
        for sample in range(16)
    }
    assert len(drawn) == 5 * 16, "no two seeds share a sample"
    assert all(each is not None and 0 <= each < 2**63 for each in drawn)
    assert sampling_requests.SamplingParams(seed=42).seed_of(0) == 42
    assert sampling_requests.SamplingParams().seed_of(0) is None


MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}
NO_LAYERS = {"rank": 1, "train_mlp": False, "train_attn": False, "train_unembed": False}
STEP = {"model_id": "m", "seq_id": 1, "adam_params": {}}
SAVE = {"model_id": "m", "seq_id": 1}
LOAD = {"path": PATH, "optimizer": True}
SAMPLE = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}, "base_model": "b"}
IMAGE = {"chunks": [{"type": "image", "data": "aa", "format": "png"}]}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("CreateModelRequest", {**MODEL, "lora_config": {"rank": 1025}}, "lora_config.rank"),
    ("CreateModelRequest", {**MODEL, "lora_config": NO_LAYERS}, "no layer is not offered"),
    ("CreateModelRequest", {**MODEL, "optimizer_config": {"type": "dimuon"}}, "optimizer_config.type.*adamw"),
    ("CreateSessionRequest", {"tags": [], "sdk_version": "1", "user_metadata": {"a": "x" * 20_000}}, "16384 bytes"),
    ("OptimStepRequest", {**STEP, "adam_params": {"learning_rate": math.nan}}, "adam_params.learning_rate"),
    ("OptimStepRequest", {**SAVE, "optimizer_params": {"type": "dimuon"}}, "other than adamw"),
    ("SaveWeightsRequest", {**SAVE, "path": ".."}, "path"),
    ("LoadWeightsRequest", {**LOAD, **SAVE, "session_id": "s", "model_seq_id": 0}, "either model_id"),
    ("LoadWeightsRequest", {**LOAD, **SAVE, "path": SAMPLER_PATH}, "without the optimizer"),
    ("LoadWeightsRequest", {**LOAD, **SAVE, "path": "tinker://m/weights/../x"}, "path"),
    ("SaveWeightsForSamplerRequest", {**SAVE, "path": "a", "kind": "inflight"}, "not offered"),
    ("CreateSamplingSessionRequest", {"session_id": "s", "sampling_session_seq_id": 0}, "base_model or model_path"),
    ("SampleRequest", {**SAMPLE, "prompt": {"chunks": []}}, "prompt.*0 tokens"),
    ("SampleRequest", {**SAMPLE, "prompt": IMAGE}, "encoded_text"),
    ("SampleRequest", {**SAMPLE, "sampling_params": {"temperature": -0.1}}, "sampling_params.temperature"),
    ("SampleRequest", {**SAMPLE, "sampling_params": {"stop": [1, "a"]}}, "sampling_params.stop"),
    ("SampleRequest", {**SAMPLE, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "length - 1"),
    ("SampleRequest", {**SAMPLE, "record_stability_info": True}, "record_stability_info is not offered"),
    ("SampleRequest", {"prompt": SAMPLE["prompt"], "sampling_params": {}}, "it has sampling_session_id"),
]


def test_an_error_names_the_field_and_does_not_repeat_what_was_sent() -> None:
    for kind, sent, said in WRONG:
        with pytest.raises(ProtocolError, match=said):
            request(kind_of(kind), json.dumps(sent).encode())
    wrong = dict.fromkeys(("model_id", "seq_id", "path"), "s3cret!")
    with pytest.raises(ProtocolError) as error:
        request(requests.SaveWeightsRequest, json.dumps(wrong).encode())
    assert "s3cret" not in str(error.value)


def test_a_body_that_is_no_object_or_beyond_the_limit_is_refused() -> None:
    deep, long = b"[" * 100_000, b'{"model_id": ' + b"9" * 10_000
    for body in (b"", b"null", b"[]", b"\xff\xfe", deep, long, b'{"a":"\\ud800"}'):
        with pytest.raises(ProtocolError):
            request(requests.GetInfoRequest, body)
    with pytest.raises(ProtocolError, match="27 bytes or more, 26 are allowed"):
        decompressed(b'{"model_id":  "s:train:0" }', "", 26)


@given(st.sampled_from(WRITTEN), st.data())
def test_damaged_requests_raise_protocol_errors_alone(written: Any, data: st.DataObject) -> None:
    body = json.dumps(data.draw(mutated(body_of(written)))).encode()
    for damaged in (body, data.draw(mutated_bytes(body))):
        said = ""
        try:
            request(kind_of(type(written).__name__), damaged)
        except ProtocolError as error:
            said = str(error)
        assert len(said) < 2000
