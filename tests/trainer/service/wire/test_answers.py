"""The service's messages are the SDK's, field by field, and its own deserialisers read the answers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto import tinker_public_pb2
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from weightlane.trainer.service.wire import messages
from weightlane.trainer.service.wire.answers import Sample, pass_answer, sample_answer, training_metrics

shapes_of = st.lists(
    st.integers(1, 4).flatmap(
        lambda length: st.just((length,)) | st.integers(1, 3).map(lambda labels: (length, labels))
    ),
    max_size=6,
)


@given(shapes_of, st.integers(0, 2**32))
def test_the_sdk_reads_the_outputs_of_a_pass(shapes: list[tuple[int, ...]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    widest = max((shape[1] for shape in shapes if len(shape) > 1), default=None)
    outputs = [torch.randn((shape[0], widest) if widest else shape, generator=generator) for shape in shapes]
    read = deserialize_forward_backward_output(pass_answer(outputs, shapes, {"loss:sum": 1.5}))
    assert (read.loss_fn_output_type, read.metrics) == ("ArrayRecord", {"loss:sum": 1.5})
    assert len(read.loss_fn_outputs) == len(shapes)
    for found, output, shape in zip(read.loss_fn_outputs, outputs, shapes, strict=True):
        assert list(found) == ["logprobs"]
        assert found["logprobs"].shape == list(shape)
        own = output if not widest else output[:, : shape[1]] if len(shape) > 1 else output[:, 0]
        assert torch.equal(found["logprobs"].to_torch(), own)


def test_the_sdk_adds_up_the_metrics_of_chunks() -> None:
    chunks = [
        deserialize_forward_backward_output(
            pass_answer([torch.zeros(1)] * count, [(1,)] * count, training_metrics(report))
        )
        for count, report in ((1, {"loss": 1.0, "ratio": 2.0}), (3, {"loss": 0.5, "ratio": 4.0}))
    ]
    assert combine_fwd_bwd_output_results(chunks).metrics == {"loss:sum": 1.5, "ratio:sum": 6.0}


def test_the_sdk_reads_samples_and_finds_nothing_that_nobody_asked_for() -> None:
    samples = [
        Sample([5, 6], [-0.5, -0.25], "stop", [[(5, -0.5), (1, -2.0)], [(6, -0.25)]]),
        Sample([], [], "length", []),
        Sample([7], None, "length"),
    ]
    written = sample_answer(
        samples,
        prompt_logprobs=[None, -1.5, -0.75],
        prompt_top=[None, [(3, -1.0), (4, -1.5), (9, -3.0)], [(4, -0.75)]],
        top_k=2,
        top_prompt_k=2,
    )
    read = deserialize_sample_response(written)
    assert [(each.tokens, each.logprobs, each.stop_reason) for each in read.sequences] == [
        ([5, 6], [-0.5, -0.25], "stop"),
        ([], None, "length"),
        ([7], None, "length"),
    ]
    assert [each.topk_logprobs for each in read.sequences] == [[[(5, -0.5), (1, -2.0)], [(6, -0.25)]], None, None]
    assert read.prompt_logprobs == [None, -1.5, -0.75]
    assert read.topk_prompt_logprobs == [None, [(3, -1.0), (4, -1.5)], [(4, -0.75)]]
    assert read.topk_prompt_logprobs_np is not None
    assert read.topk_prompt_logprobs_np.logprobs[0].tolist() == [-99999.0, -99999.0]
    read = deserialize_sample_response(sample_answer([Sample(np.array([2**31 - 1]), np.array([-1.0]), "stop")]))
    assert read.sequences[0].tokens == [2**31 - 1]
    for absent in ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs", "prompt_alt_tokens"):
        assert getattr(read, absent) is None


ROOTS = ("ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse")


def contained(root: Any) -> dict[str, Any]:
    """The descriptor `root`, and those of all messages and enumerations that it contains, by full name."""
    found: dict[str, Any] = {}
    waiting = [root]
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name in found:
            continue
        found[descriptor.full_name] = descriptor
        for field in getattr(descriptor, "fields", ()):
            waiting += [each for each in (field.message_type, field.enum_type) if each is not None]
    return found


def as_data(descriptor: Any, fields: Collection[str] | None = None) -> Any:
    """A descriptor as the compiler's own message: every name, number, type, label, presence, oneof and option.

    With `fields`, without all others, and without the oneofs that only they are in, which are the last ones.
    """
    if hasattr(descriptor, "values"):
        enumeration = descriptor_pb2.EnumDescriptorProto()
        descriptor.CopyToProto(enumeration)
        return enumeration
    made = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(made)
    if fields is not None:
        left = [field for field in made.field if field.name in fields]
        del made.field[:]
        made.field.extend(left)
        del made.oneof_decl[len({field.oneof_index for field in left if field.HasField("oneof_index")}) :]
    return made


def test_every_message_equals_the_sdks_in_the_fields_that_it_has() -> None:
    for root in ROOTS:
        theirs = contained(tinker_public_pb2.DESCRIPTOR.message_types_by_name[root])
        ours = contained(getattr(messages, root).DESCRIPTOR)
        for name, descriptor in ours.items():
            fields = [field.name for field in getattr(descriptor, "fields", ())]
            assert as_data(descriptor) == as_data(theirs[name], fields), name
