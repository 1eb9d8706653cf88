"""The messages equal the SDK's own, field by field, and live beside them in one process."""

from __future__ import annotations

from typing import Any

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


def test_every_message_equals_the_sdks() -> None:
    for root in ROOTS:
        theirs = contained(tinker_public_pb2.DESCRIPTOR.message_types_by_name[root])
        ours = contained(getattr(messages, root).DESCRIPTOR)
        assert set(ours) == set(theirs)
        for name, descriptor in theirs.items():
            assert as_data(ours[name]) == as_data(descriptor), name
