"""The messages equal the SDK's own, field by field, and live beside them in one process."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from tinker.proto import tinker_public_pb2

from weightlane.trainer.service.wire import messages

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


def as_data(descriptor: Any) -> Any:
    """A descriptor as the compiler's own message: every name, number, type, label, presence, oneof and option."""
    made = descriptor_pb2.EnumDescriptorProto() if hasattr(descriptor, "values") else descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(made)
    return made


@pytest.mark.parametrize("root", ROOTS)
def test_every_message_equals_the_sdks(root: str) -> None:
    theirs = contained(tinker_public_pb2.DESCRIPTOR.message_types_by_name[root])
    ours = contained(getattr(messages, root).DESCRIPTOR)
    assert set(ours) == set(theirs)
    for name, descriptor in theirs.items():
        assert as_data(ours[name]) == as_data(descriptor), name


def test_the_constants_are_the_sdks_numbers() -> None:
    for name in (
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
        "STOP_REASON_STOP",
        "STOP_REASON_LENGTH",
    ):
        assert getattr(messages, name) == getattr(tinker_public_pb2, name)


def test_the_sdk_reads_what_is_written_here() -> None:
    ours = messages.ForwardBackwardRequest(model_id="m", seq_id=3, forward_only=True)
    ours.data.add().loss_fn_inputs["weights"].sparse_csr.values = b"1234"
    ours.loss_fn_config_v2["beta"].number = 0.5
    theirs = tinker_public_pb2.ForwardBackwardRequest.FromString(ours.SerializeToString())
    assert (theirs.model_id, theirs.seq_id, theirs.forward_only) == ("m", 3, True)
    assert theirs.data[0].loss_fn_inputs["weights"].WhichOneof("encoding") == "sparse_csr"
    assert theirs.loss_fn_config_v2["beta"].WhichOneof("value") == "number"
