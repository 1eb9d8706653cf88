"""Requests that the SDK itself encodes become the batches that their tensors say; others raise `ProtocolError` alone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import zstandard
from fuzzing import mutated_bytes
from hypothesis import example, given
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.service.wire import batches, bodies, tensors
from weightlane.trainer.service.wire.batches import TrainBody, TrainRequest
from weightlane.trainer.service.wire.bodies import address_of, decompressed

VOCABULARY = 50
MOST_BYTES = 64 << 20


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(tinker.ModelInput.from_ints(tokens), inputs)


def message_of(data: list[tinker.Datum], loss: Any = "cross_entropy", config: Any = None, seq_id: int = 1) -> Any:
    """The SDK's own message."""
    request = ForwardBackwardRequest(ForwardBackwardInput(data, loss, config), "s:train:0", seq_id)
    return forward_backward_request_to_proto(request)


def train_request(
    body: bytes, encoding: str = "", *, vocabulary: int = VOCABULARY, most_bytes: int = MOST_BYTES
) -> TrainRequest:
    return TrainBody.parse(decompressed(body, encoding, most_bytes)).request(vocabulary)


def decoded(message: Any, **given_options: Any) -> TrainRequest:
    return train_request(message.SerializeToString(), **given_options)


def valid() -> Any:
    """A message with every kind of part that is read."""
    topk = torch.tensor([[3, 0, 0, 0, 0], [4, 0, 0, 0, 0], [5, 6, 0, 0, 0]])
    weights = torch.tensor([[0.5, 0, 0, 0, 0], [0.0, 0, 0, 0, 0], [0.25, 0.75, 0, 0, 0]])
    data = [
        datum([1, 2, 3], target_tokens=topk, weights=weights),
        datum([7, 8], target_tokens=[8, 9], weights=[0.0, 1.0]),
    ]
    return message_of(data, "ppo", {"clip_low_threshold": 0.9, "mode": "plain"})


def test_a_request_of_the_sdk() -> None:
    logprobs, advantages = np.array([-0.5, -0.25], np.float32), torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    message = message_of(
        [datum([1, 2], target_tokens=[2, 3], logprobs=logprobs, advantages=advantages, weights=torch.tensor([0, 1]))],
        "ppo",
        {"clip_low_threshold": 0.9, "mode": "plain"},
        seq_id=7,
    )
    message.forward_only = True
    body = TrainBody.parse(message.SerializeToString())
    assert (body.model_id, body.seq_id, body.forward_only) == ("s:train:0", 7, True)
    found = body.request(VOCABULARY)
    assert found.loss == "ppo"
    assert found.loss_config == {"clip_low_threshold": 0.9, "mode": "plain"}
    assert found.shapes == ((2,),)
    (sequence,) = found.batch.sequences
    assert sequence.tokens.tolist() == [1, 2]
    assert sequence.targets.tolist() == [2, 3]
    assert {name: each.tolist() for name, each in sequence.per_token.items()} == {
        "advantages": [1.0, -2.0],
        "logprobs": [-0.5, -0.25],
        "weights": [0.0, 1.0],
    }
    assert {each.dtype for each in sequence.per_token.values()} == {torch.float32}


def test_what_a_request_may_leave_out_and_which_part_counts() -> None:
    message = valid()
    message.loss_fn_config["clip_low_threshold"] = 0.5
    assert decoded(message).loss_config["clip_low_threshold"] == 0.9
    message.ClearField("loss_fn_config_v2")
    assert decoded(message).loss_config == {"clip_low_threshold": 0.5}, "the older settings, where there are no newer"
    chunks = tinker.Datum(tinker.ModelInput.from_ints([1, 2]).append_int(3), {"target_tokens": [2, 3, 4]})
    batch = decoded(message_of([chunks, datum([1, 2], target_tokens=[2, 3], weights=[0.0, 0.5])])).batch
    assert batch.sequences[0].tokens.tolist() == [1, 2, 3]
    assert batch.target_tokens == 5, "targets of weight 0 stay"
    assert [each.per_token["weights"].tolist() for each in batch.sequences] == [[1.0] * 3, [0.0, 0.5]]
    message.ClearField("data")
    found = TrainBody.parse(message.SerializeToString())
    assert (found.model_id, found.seq_id) == ("s:train:0", 1), "the address, whatever is wrong with the rest"
    with pytest.raises(ProtocolError, match="0 datums"):
        found.request(VOCABULARY)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_labels_are_padded_to_the_largest_number(sizes: list[tuple[int, int]], seed: int, sparse: bool) -> None:
    """0 labels mean a target without a second dimension."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, labels) if labels else (length,) for length, labels in sizes]
    data, expected = [], []
    for shape in shapes:
        targets = torch.randint(0, VOCABULARY, shape, generator=generator)
        weights = torch.rand(shape, generator=generator)
        keep = torch.rand(shape, generator=generator) < 0.2 if sparse else torch.ones(shape, dtype=torch.bool)
        targets, weights = targets * keep, weights * keep
        data.append(datum([1] * shape[0], target_tokens=targets, weights=weights))
        expected.append((targets, weights))
    found = decoded(message_of(data))
    assert found.shapes == tuple(shapes)
    widest = max(labels for _, labels in sizes)
    for (length, labels), (targets, weights), sequence in zip(sizes, expected, found.batch.sequences, strict=True):
        got, got_weights = sequence.targets, sequence.per_token["weights"]
        assert got.shape == got_weights.shape == ((length, widest) if widest else (length,))
        if widest:
            own = max(1, labels)
            assert (got[:, own:] == IGNORED).all()
            assert not got_weights[:, own:].any()
            got, got_weights = got[:, :own].reshape(targets.shape), got_weights[:, :own].reshape(targets.shape)
        assert torch.equal(got, targets)
        assert torch.equal(got_weights, weights)


def _set(name: str, **values: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        tensor = message.data[1].loss_fn_inputs[name]
        for field, value in values.items():
            if field == "shape":
                tensor.ClearField("shape")
                tensor.shape.extend(value)
            else:
                setattr(tensor, field, value)

    return change


def _csr(**values: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        tensor = message.data[0].loss_fn_inputs["target_tokens"].sparse_csr
        for field, value in values.items():
            setattr(tensor, field, np.array(value, np.int64).tobytes())

    return change


def _prompt(message: Any) -> Any:
    return message.data[1].model_input


def _another_input(message: Any) -> None:
    inputs = message.data[1].loss_fn_inputs
    inputs["logprobs"].CopyFrom(inputs["weights"])


WRONG: list[tuple[str, Callable[[Any], Any]]] = [
    ("datum 1, model_input.*id -1", lambda m: setattr(_prompt(m)[0].encoded_text, "tokens", b"\xff" * 8)),
    ("datum 1, model_input.*no whole", lambda m: setattr(_prompt(m)[0].encoded_text, "tokens", b"\1\0\0")),
    ("datum 1, model_input.*no encoded text", lambda m: setattr(_prompt(m).add().image, "format", "png")),
    ("datum 1, target_tokens.*id 50 at 1", _set("target_tokens", dense=np.array([0, 50]).tobytes())),
    ("datum 1, target_tokens.*2 tokens", _set("target_tokens", dense=np.array([1]).tobytes(), shape=[1])),
    ("datum 1.*no target_tokens", lambda m: m.data[1].loss_fn_inputs.pop("target_tokens")),
    ("datum 1, weights.*nan at 1", _set("weights", dense=np.array([0, np.nan], "<f4").tobytes())),
    ("datum 1, weights.*2 values", _set("weights", shape=[2**62])),
    ("two dimensions", _set("weights", shape=[1] * 100_000)),
    ("datum 0.*no logprobs", _another_input),
    ("datum 1.*loss_fn_inputs are '../x", lambda m: m.data[1].loss_fn_inputs["../x"]),
    ("datum 0, target_tokens.*3 row pointers", _csr(crow_indices=[0, 2, 4])),
    ("datum 0, target_tokens.*row pointers", _csr(crow_indices=[0, 3, 2, 4])),
    ("datum 0, target_tokens.*go up", _csr(col_indices=[0, 0, 0, 5])),
    ("model_id.*identifier", lambda m: setattr(m, "model_id", "../../etc")),
    ("loss_fn_config, beta.*nan", lambda m: setattr(m.loss_fn_config_v2["beta"], "number", float("nan"))),
]


def test_an_error_names_datum_and_field() -> None:
    for said, change in WRONG:
        message = valid()
        change(message)
        with pytest.raises(ProtocolError, match=said):
            decoded(message)


def test_sparse_tensors_are_counted_together_before_any_is_made_dense() -> None:
    """Each of them would take 8 MB, and a hundred times less in the body."""
    message = message_of(
        [datum([1] * 1000, target_tokens=torch.zeros(1000, 1024, dtype=torch.int64)) for _ in range(20)]
    )
    assert len(message.SerializeToString()) < 300_000
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="20480000 entries"):
            decoded(message)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


def test_a_request_at_the_limits_is_read_and_one_beyond_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = valid()
    size = len(message.SerializeToString())
    for said, module, name, exact in (
        ("datums", batches, "MOST_DATUMS", 2),
        ("3 tokens", batches, "MOST_TOKENS", 3),
        ("labels", tensors, "MOST_LABELS", 5),
        ("entries", tensors, "MOST_CELLS", 50),
    ):
        monkeypatch.setattr(module, name, exact)
        assert decoded(message, most_bytes=size).shapes == ((3, 5), (2,))
        monkeypatch.setattr(module, name, exact - 1)
        with pytest.raises(ProtocolError, match=said):
            decoded(message)
        monkeypatch.undo()
    with pytest.raises(ProtocolError, match="allowed"):
        decoded(message, most_bytes=size - 1)
    monkeypatch.setattr(bodies, "MOST_PARTS", 20)
    with pytest.raises(ProtocolError, match="more than 20 parts"):
        decoded(message)


def test_a_compressed_body_is_read_and_one_that_would_grow_is_refused_before_it_does() -> None:
    body = valid().SerializeToString()
    compressed = zstandard.ZstdCompressor().compress(body)
    assert train_request(compressed, "zstd").shapes == ((3, 5), (2,))
    stream = zstandard.ZstdCompressor().compressobj()
    for spoilt, encoding, said in (
        (compressed[:-3], "zstd", "."),
        (compressed + compressed, "zstd", "."),
        (b"", "zstd", "."),
        (body, "zstd", "."),
        (body, "gzip", "gzip"),
        (zstandard.ZstdCompressor().compress(bytes(2**27)), "zstd", "134217728 bytes"),
        (stream.compress(bytes(2**20)) + stream.flush(), "zstd", "does not say its size"),
        (b"\x1a\x00" * 2**20, "", "parts"),
        (b"\x1a\x80\x80\x40" + b"\x0a\x00" * 2**19, "", "parts"),
    ):
        with pytest.raises(ProtocolError, match=said):
            train_request(spoilt, encoding)


def only_protocol_errors(body: bytes, encoding: str = "") -> None:
    assert len(address_of(body, encoding)) <= 1024
    said = ""
    try:
        train_request(body, encoding)
    except ProtocolError as error:
        said = str(error)
    assert len(said) < 2000


BODY = valid().SerializeToString()


@given(mutated_bytes(BODY) | mutated_bytes(zstandard.ZstdCompressor().compress(BODY)))
@example(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"\x0b\x0b\x0b")
def test_random_and_damaged_bytes_raise_protocol_errors_alone(body: bytes) -> None:
    for encoding in ("", "zstd", "br"):
        only_protocol_errors(body, encoding)


@given(st.data())
def test_damaged_tensors_raise_protocol_errors_alone(data: st.DataObject) -> None:
    message = valid()
    each = data.draw(
        st.sampled_from([*message.data[0].loss_fn_inputs.values(), *message.data[1].loss_fn_inputs.values()])
    )
    numbers = st.lists(st.integers(-3, 7) | st.integers(-(2**63), 2**63 - 1), max_size=6)
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.integers(0, 4)):
            case 0:
                each.dtype = data.draw(st.integers(0, 6))
            case 1:
                each.ClearField("shape")
                each.shape.extend(data.draw(numbers))
            case 2:
                each.dense = data.draw(st.binary(max_size=40))
            case 3:
                each.sparse_csr.crow_indices = np.array(data.draw(numbers), np.int64).tobytes()
            case _:
                each.sparse_csr.col_indices = np.array(data.draw(numbers), np.int64).tobytes()
    only_protocol_errors(message.SerializeToString())
