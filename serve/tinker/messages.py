"""The protobuf messages of the protocol.

They are built at import from the tables below, in a descriptor pool of this module: in protobuf's default pool they would conflict with the
messages of the official client, if it is imported in the same process. Field numbers and types are those of the protocol; on the wire, names
do not matter. `payloads` and `sample_answers` parse and write the messages.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"
_FILE = "drivetrain_tinker.proto"
# The values of `FieldDescriptorProto.Label` and `FieldDescriptorProto.Type` in protobuf's descriptor.proto.
_LABELS = {"": 1, "optional": 1, "repeated": 3}
_TYPES = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
_ENUMS = {
    "StopReason": {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1},
    "DType": {"DTYPE_UNSPECIFIED": 0, "DTYPE_FLOAT32": 1, "DTYPE_INT64": 2, "DTYPE_INT32": 3, "DTYPE_BFLOAT16": 4},
}
_MESSAGES = {
    "SampleResponse": (
        "repeated SampledSequence sequences = 1",
        "optional bytes prompt_logprobs = 2",
        "optional TopkLogprobs topk_prompt_logprobs = 3",
        "int32 prompt_cache_hit_tokens = 4",
        "optional Tensor target_prompt_logprobs = 5",
        "optional PromptAltTokens prompt_alt_tokens = 6",
    ),
    "PromptAltTokens": ("Tensor tokens = 1", "Tensor logprobs = 2"),
    "SampledSequence": (
        "StopReason stop_reason = 1",
        "bytes tokens = 2",
        "optional bytes logprobs = 3",
        "optional TopkLogprobs topk_sampled_logprobs = 4",
    ),
    "TopkLogprobs": ("bytes token_ids = 1", "bytes logprobs = 2", "uint32 k = 3", "uint32 length = 4"),
    "SparseCsr": ("bytes values = 1", "bytes crow_indices = 2", "bytes col_indices = 3"),
    "Tensor": (
        "oneof:encoding bytes dense = 1",
        "oneof:encoding SparseCsr sparse_csr = 2",
        "DType dtype = 3",
        "repeated int64 shape = 4",
    ),
    "BatchedTensor": ("bytes data = 1", "bytes offsets = 2", "DType dtype = 3", "repeated int64 trailing_shape = 4"),
    "ArrayRecord": ("string type_tag = 1", "map BatchedTensor fields = 2", "int64 num_datums = 3"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type = 1",
        "repeated ArrayRecord loss_fn_outputs = 2",
        "map double metrics = 3",
    ),
    "ForwardBackwardRequest": (
        "string model_id = 1",
        "int32 seq_id = 2",
        "repeated Datum data = 3",
        "string loss_fn = 4",
        "map double loss_fn_config = 5",
        "bool forward_only = 6",
        "map LossConfigValue loss_fn_config_v2 = 7",
    ),
    "LossConfigValue": ("oneof:value double number = 1", "oneof:value string text = 2"),
    "Datum": ("repeated Chunk model_input = 1", "map Tensor loss_fn_inputs = 2"),
    "Chunk": (
        "oneof:chunk EncodedTextChunk encoded_text = 1",
        "oneof:chunk ImageChunk image = 2",
        "oneof:chunk DmelChunk dmel = 3",
    ),
    "EncodedTextChunk": ("bytes tokens = 1",),
    "ImageChunk": (
        "bytes data = 1",
        "string format = 2",
        "optional int32 expected_tokens = 3",
        "optional ImageDimensions override_dimensions = 4",
    ),
    "ImageDimensions": ("uint32 width = 1", "uint32 height = 2"),
    "DmelChunk": ("bytes dmel = 1",),
}


def _set_type(field: Any, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        # 14 is TYPE_ENUM, and 11 is TYPE_MESSAGE. A leading dot makes the name absolute.
        field.type, field.type_name = (14 if kind in _ENUMS else 11), f".{PACKAGE}.{kind}"


def _add_field(message: Any, text: str) -> None:
    declaration, _, number = text.partition(" = ")
    *modifiers, kind, name = declaration.split()
    modifier = modifiers[0] if modifiers else ""
    field = message.field.add(name=name, number=int(number), label=_LABELS.get(modifier, 1))
    if modifier == "map":
        # A map is a repeated message with a key and a value. Protobuf requires this name for it: the name of the field in
        # camel case, followed by Entry.
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=_TYPES["string"])
        _set_type(entry.field.add(name="value", number=2, label=1), kind)
        field.label, field.type, field.type_name = 3, 11, f".{PACKAGE}.{message.name}.{entry.name}"
        return
    _set_type(field, kind)
    if modifier.startswith("oneof:"):
        name_of_group = modifier.removeprefix("oneof:")
        names = [group.name for group in message.oneof_decl]
        if name_of_group not in names:
            message.oneof_decl.add(name=name_of_group)
            names.append(name_of_group)
        field.oneof_index = names.index(name_of_group)


def _add_presence(message: Any, fields: tuple[str, ...]) -> None:
    """Put each optional field into a oneof group with only this field, which is how proto3 records whether a scalar is set."""
    for text in fields:
        if text.startswith("optional "):
            name = text.partition(" = ")[0].split()[-1]
            field = next(field for field in message.field if field.name == name)
            # Protobuf requires these groups to come after all others.
            message.oneof_decl.add(name=f"_{name}")
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl) - 1


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, text)
        _add_presence(message, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[attr-defined]  # the stubs lack it
    return pool


_POOL = _pool()


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
FLOAT32, INT64, INT32 = 1, 2, 3
"""The values of the enum DType."""
STOP, LENGTH = 0, 1
"""The values of the enum StopReason: why a completion ended."""
