"""Values inside messages: plain data, tensors, and registered dataclasses, without pickle.

A value becomes plain data in which what JSON and msgpack lack is a mapping with the key `$`: `{"$": "tensor", "dtype": "float32",
"shape": [2], "part": 0}`. The bytes of a tensor are a part of the message of their own, in msgpack, or base64 `data`, in JSON.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...engine.errors import ConfigError
from .codec import Part
from .messages import Message
from .names import Names, is_reference

M = TypeVar("M", bound=Message)
TYPE = "$"
_INT64 = range(-(2**63), 2**63)
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class ValueDecodeError(ValueError):
    """Plain data does not stand for a value."""


def dump(message: M, names: Names, *, inline: bool = False) -> tuple[M, list[Part]]:
    """Replace the values in a message by plain data.

    Args:
        message: The message.
        names: The classes and functions that may be referred to.
        inline: Whether the data of tensors goes into the message, in base64, instead of parts of their own.

    Returns:
        The message, and the parts.

    Raises:
        ConfigError: A value cannot be sent; the message says where it is.
    """
    parts: list[Part] = []
    writer = _Writer(names, None if inline else parts)
    plain = {name: writer.plain(getattr(message, name), name) for name in message.values}
    return (msgspec.structs.replace(message, **plain) if plain else message), parts


def load(message: M, parts: Sequence[Any], names: Names) -> M:
    """Replace the plain data in a message by values; the inverse of `dump`.

    Args:
        message: The message.
        parts: The parts that came with it; tensors share their memory.
        names: The classes and functions that may be referred to.

    Raises:
        ConfigError: The message refers to a name that is not allowed, or a class refuses its fields.
        ValueDecodeError: The data does not stand for a value.
    """
    values = {name: _value(getattr(message, name), parts, names) for name in message.values}
    return msgspec.structs.replace(message, **values) if values else message


class _Writer:
    def __init__(self, names: Names, parts: list[Part] | None) -> None:
        self._names, self._parts = names, parts

    def plain(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if value in _INT64 else {TYPE: "int", "value": str(value)}
        if type(value) is float:
            # JSON has neither NaN nor infinities.
            return value if math.isfinite(value) else {TYPE: "float", "value": str(value)}
        if isinstance(value, np.generic):
            return self.plain(value.item(), where)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.dtype.names:
                raise ConfigError(f"{where} is an array of {value.dtype}, which cannot be sent to a worker; send numbers")
            return {**self._tensor(torch.from_numpy(np.ascontiguousarray(value)), where), TYPE: "array"}
        if type(value) is list:
            return [self.plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if type(value) in (tuple, torch.Size):
            return {TYPE: "tuple", "items": self.plain(list(value), where)}
        if type(value) in (set, frozenset):
            return {TYPE: type(value).__name__, "items": self.plain(list(value), where)}
        if isinstance(value, bytes | bytearray | memoryview):
            return {TYPE: "bytes", **self._data(bytes(value))}
        if isinstance(value, PurePath):
            return {TYPE: "path", "value": str(value)}
        if isinstance(value, torch.dtype):
            return {TYPE: "dtype", "value": _dtype_name(value, where)}
        if is_reference(value):
            return {TYPE: "name", "value": self._refer(value, where)}
        if is_dataclass(value):
            content = {f.name: self.plain(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value) if f.init}
            return {TYPE: self._refer(type(value), where), "fields": content}
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        raise ConfigError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to a worker; send numbers, "
            "strings, lists, dicts, tensors, or a dataclass"
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(type(key) is str for key in value) and TYPE not in value:
            return {key: self.plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[self.plain(key, where), self.plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {TYPE: "dict", "items": items}

    def _refer(self, value: Any, where: str) -> str:
        try:
            return self._names.refer(value)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_meta:
            raise ConfigError(f"{where} is a {value.layout} tensor, which cannot be sent to a worker; send a dense tensor")
        flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return {
            TYPE: "tensor",
            "dtype": _dtype_name(value.dtype, where),
            "shape": list(value.shape),
            **self._data(flat.numpy().data),
        }

    def _data(self, data: Part) -> dict[str, Any]:
        if self._parts is None:
            return {"data": base64.b64encode(data).decode()}
        self._parts.append(data)
        return {"part": len(self._parts) - 1}


def _dtype_name(dtype: torch.dtype, where: str) -> str:
    if dtype not in _NAMES:
        raise ConfigError(f"{where} has the data type {dtype}, which cannot be sent to a worker")
    return _NAMES[dtype]


def _value(plain: Any, parts: Sequence[Any], names: Names) -> Any:
    if isinstance(plain, list):
        return [_value(item, parts, names) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if TYPE not in plain:
        return {key: _value(item, parts, names) for key, item in plain.items()}
    kind = plain[TYPE]
    try:
        if kind in ("tensor", "array"):
            tensor = _tensor(plain, parts)
            return tensor if kind == "tensor" else tensor.numpy()
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_value(plain["items"], parts, names))
        if kind == "dict":
            return {_value(key, parts, names): _value(item, parts, names) for key, item in plain["items"]}
        if kind == "bytes":
            return bytes(_bytes(plain, parts))
        if kind in ("int", "float", "path"):
            return {"int": int, "float": float, "path": Path}[kind](plain["value"])
        if kind == "dtype":
            return _DTYPES[plain["value"]]
        if kind == "name":
            return names.resolve(plain["value"])
        content = {str(name): _value(item, parts, names) for name, item in plain["fields"].items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        if isinstance(e, ConfigError | ValueDecodeError):
            raise
        raise ValueDecodeError(f"{str(kind)[:80]!r} is not a value: {type(e).__name__}: {e}") from e
    return _instance(str(kind), content, names)


def _instance(name: str, content: dict[str, Any], names: Names) -> Any:
    cls = names.resolve(name)
    if not isinstance(cls, type) or not is_dataclass(cls):
        raise ValueDecodeError(f"{name} is not a dataclass, so it has no fields")
    if unknown := sorted(content.keys() - {f.name for f in fields(cls) if f.init}):
        raise ValueDecodeError(f"{name} has no field {unknown[0]!r}")
    try:
        return cls(**content)
    except TypeError as e:  # a required field is missing
        raise ValueDecodeError(f"{name}: {e}") from e


def _tensor(plain: dict[str, Any], parts: Sequence[Any]) -> Tensor:
    dtype, shape = _DTYPES[plain["dtype"]], tuple(plain["shape"])
    data = memoryview(_bytes(plain, parts)).cast("B")
    if any(not isinstance(size, int) or size < 0 for size in shape) or data.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueDecodeError(f"a tensor of shape {list(shape)} and type {plain['dtype']} has {data.nbytes} bytes of data")
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    aligned = np.frombuffer(data, dtype=np.uint8).ctypes.data % dtype.itemsize == 0
    # What cannot be written to, or is not aligned, is copied: roles may work in place.
    memory = data if aligned and not data.readonly else bytearray(data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)


def _bytes(plain: dict[str, Any], parts: Sequence[Any]) -> Part:
    if "data" in plain:
        return bytearray(base64.b64decode(plain["data"], validate=True))
    index = plain["part"]
    if not isinstance(index, int) or not 0 <= index < len(parts):
        raise ValueDecodeError(f"part {index!r} of {len(parts)} does not exist")
    part: Part = parts[index]
    return part
