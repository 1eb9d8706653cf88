"""The Protocol Buffers messages of the Tinker API that carry tensors, as classes.

They are those of ``tinker_public.proto`` in the public SDK ``tinker`` 0.38.0 (Apache-2.0), equal in names, numbers, types
and presence, but without fields that are neither read nor written here. They are in a descriptor pool of their own, so the SDK's
module can be loaded in the same process.
"""

from __future__ import annotations

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
"""Values of each enumeration, in the order of their numbers from 0."""

_SCHEMA = """
SampleResponse
    1 repeated SampledSequence sequences
    2 optional bytes prompt_logprobs
    3 optional TopkLogprobs topk_prompt_logprobs
SampledSequence
    1 StopReason stop_reason
    2 bytes tokens
    3 optional bytes logprobs
    4 optional TopkLogprobs topk_sampled_logprobs
TopkLogprobs
    1 bytes token_ids
    2 bytes logprobs
    3 uint32 k
    4 uint32 length
SparseCsr
    1 bytes values
    2 bytes crow_indices
    3 bytes col_indices
Tensor
    1 oneof:encoding bytes dense
    2 oneof:encoding SparseCsr sparse_csr
    3 DType dtype
    4 repeated int64 shape
BatchedTensor
    1 bytes data
    2 bytes offsets
    3 DType dtype
    4 repeated int64 trailing_shape
ArrayRecord
    1 string type_tag
    2 map BatchedTensor fields
    3 int64 num_datums
ForwardBackwardOutput
    1 string loss_fn_output_type
    2 repeated ArrayRecord loss_fn_outputs
    3 map double metrics
ForwardBackwardRequest
    1 string model_id
    2 int32 seq_id
    3 repeated Datum data
    4 string loss_fn
    5 map double loss_fn_config
    6 bool forward_only
    7 map LossConfigValue loss_fn_config_v2
LossConfigValue
    1 oneof:value double number
    2 oneof:value string text
Datum
    1 repeated Chunk model_input
    2 map Tensor loss_fn_inputs
Chunk
    1 oneof:chunk EncodedTextChunk encoded_text
EncodedTextChunk
    1 bytes tokens
"""
"""Each message, and of each field: number, label, type and name. ``map TYPE`` has string keys; ``oneof:NAME`` is a member."""

_Field = descriptor_pb2.FieldDescriptorProto


def _file() -> Any:
    """The schema as a ``FileDescriptorProto``."""
    found = descriptor_pb2.FileDescriptorProto(name="weightlane/tinker_public.proto", package=PACKAGE, syntax="proto3")
    for enum, values in _ENUMS.items():
        declared = found.enum_type.add(name=enum)
        for at, value in enumerate(values):
            declared.value.add(name=value, number=at)
    message: Any = None
    for line in _SCHEMA.strip().splitlines():
        if line[0] != " ":
            message = found.message_type.add(name=line)
            continue
        number, *label, kind, name = line.split()
        _add_field(message, name, int(number), kind, label[0] if label else "")
    for message in found.message_type:  # the oneofs of optional fields come last, as the compiler declares them
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return found


def _add_field(message: Any, name: str, number: int, kind: str, label: str) -> None:
    if label == "map":
        entry = message.nested_type.add(
            name=re.sub(r"(?:^|_)([a-z0-9])", lambda match: match[1].upper(), name) + "Entry"
        )
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string", "")
        _add_field(entry, "value", 2, kind, "")
        label, kind = "repeated", f"{message.name}.{entry.name}"
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if label == "repeated" else _Field.LABEL_OPTIONAL
    if kind[0].isupper():
        field.type = _Field.TYPE_ENUM if kind in _ENUMS else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    if label == "optional":
        field.proto3_optional = True
    elif label.startswith("oneof:"):
        group = label.removeprefix("oneof:")
        if group not in [each.name for each in message.oneof_decl]:
            message.oneof_decl.add(name=group)
        field.oneof_index = [each.name for each in message.oneof_decl].index(group)


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
"""Data, loss and model of a forward pass, or of a forward and a backward one. Field 6 says which."""
ForwardBackwardOutput = _class("ForwardBackwardOutput")
"""The answer to a `ForwardBackwardRequest`."""
SampleResponse = _class("SampleResponse")
"""The answer to a request for samples."""

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32, DTYPE_BFLOAT16 = range(1, 5)
"""Numbers of the enumeration ``DType``, after ``DTYPE_UNSPECIFIED``."""
STOP_REASON_STOP, STOP_REASON_LENGTH = range(2)
"""Numbers of the enumeration ``StopReason``."""
