"""Values inside messages: plain data, tensors, and registered dataclasses, without pickle.

A value becomes plain data. Types that JSON and msgpack lack become a mapping with the key `$`: `{"$": "tensor", "dtype": "float32",
"shape": [2], "part": 0}`. The bytes of a tensor are a separate part of the message in msgpack, or base64 `data` in JSON.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...engine.errors import ConfigError
from ...losses.registry import RegistryConfig
from ..data_plane.store import DTYPE_NAMES, DTYPES
from .codec import FramePart
from .messages import Message
from .names import Names, contents, is_named_tuple, is_reference

M = TypeVar("M", bound=Message)
TYPE = "$"
MOVED_FIELDS = {"passengers": "extra_fields"}
"""The new names of renamed dataclass fields, by their old names, as in messages of older versions."""
_INT64 = range(-(2**63), 2**63)
_ARRAY_KINDS = "biufc"
"""The kinds of NumPy arrays that hold plain numbers."""


class ValueDecodeError(ValueError):
    """Plain data does not represent a value."""


def dump(message: M, names: Names, *, inline: bool = False, copy: bool = True) -> tuple[M, list[FramePart]]:
    """Replace the values in a message by plain data.

    Args:
        message: The message.
        names: The classes and functions that may be referred to.
        inline: Whether tensor data is put into the message in base64, instead of separate parts.
        copy: Whether parts are copies. Without copies, tensors must not change until the message has been sent.

    Returns:
        The message, and the parts.

    Raises:
        ConfigError: A value cannot be sent; the message says where it is.
    """
    parts: list[FramePart] = []
    writer = _Writer(names, None if inline else parts, copy=copy)
    try:
        plain = {name: writer.plain(getattr(message, name), name) for name in message.values}
    except RecursionError:
        raise ConfigError("a value contains itself, or is nested too deeply to be sent to a worker; make it flatter") from None
    return (msgspec.structs.replace(message, **plain) if plain else message), parts


def load(message: M, parts: Sequence[Any], names: Names) -> M:
    """Replace the plain data in a message by values; the inverse of `dump`.

    Args:
        message: The message.
        parts: The parts that came with it; tensors share their memory.
        names: The classes and functions that may be referred to.

    Raises:
        ConfigError: The message refers to a name that is not allowed, or a class refuses its fields.
        ValueDecodeError: The data does not represent a value.
    """
    values = {name: _value(getattr(message, name), parts, names) for name in message.values}
    return msgspec.structs.replace(message, **values) if values else message


class _Writer:
    def __init__(self, names: Names, parts: list[FramePart] | None, *, copy: bool) -> None:
        self._names, self._parts, self._copy = names, parts, copy

    def plain(self, value: Any, where: str) -> Any:
        """Return a value as plain data."""
        # Exact types: an instance of a subclass, such as an IntEnum, must not arrive as one of the base class.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if _is_unicode(value) else {TYPE: "str", **self._data(value.encode("utf-8", "surrogatepass"))}
        if kind is int:
            return value if value in _INT64 else {TYPE: "int", "value": hex(value)}
        if kind is float:
            # JSON has neither NaN nor infinities.
            return value if math.isfinite(value) else {TYPE: "float", "value": str(value)}
        if kind is list:
            return [self.plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        if kind in (tuple, torch.Size, set, frozenset):
            name = kind.__name__ if kind in (set, frozenset) else "tuple"
            return {TYPE: name, "items": self.plain(list(value), where)}
        if kind is complex:
            return {TYPE: "complex", "items": [self.plain(value.real, where), self.plain(value.imag, where)]}
        if isinstance(value, bytes | bytearray | memoryview):
            return {TYPE: "bytes", **self._data(bytes(value))}
        if isinstance(value, PurePath):
            return {TYPE: "path", "value": self.plain(str(value), where)}
        if isinstance(value, torch.dtype):
            return {TYPE: "dtype", "value": _dtype_name(value, where)}
        if isinstance(value, Mapping) and not is_dataclass(value):
            return self._mapping(value, where)
        return self._named(value, where)

    def _named(self, value: Any, where: str) -> Any:
        """Return the representation of a class, a function, or an instance of a named class."""
        target = value if is_reference(value) else type(value)
        supported = is_reference(value) or is_dataclass(value) or isinstance(value, Enum) or is_named_tuple(value)
        try:
            name = self._names.refer(target) if supported else ""
        except ConfigError as e:
            if self._names.pickler is None:
                raise ConfigError(f"{where}: {e}") from e
            supported = False
        if not supported:
            return self._pickled(value, where)
        if target is value:
            return {TYPE: "name", "value": name}
        if isinstance(value, Enum):
            return {TYPE: "enum", "class": name, "value": value.name}
        if is_named_tuple(value):
            return {TYPE: "namedtuple", "class": name, "items": self.plain(list(value), where)}
        content = {item: self.plain(part, f"{where}.{item}") for item, part in contents(value).items()}
        return {TYPE: name, "fields": content}

    def _pickled(self, value: Any, where: str) -> Any:
        if self._names.pickler is None:
            way = (
                "a function at the top level of a module"
                if callable(value)
                else "numbers, strings, lists, dicts, tensors, or a dataclass"
            )
            raise ConfigError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to a worker; send {way}"
            )
        try:
            data = self._names.pickler.dumps(value)
        except Exception as e:  # pickling runs code of the value's class
            raise ConfigError(f"{where} cannot be sent to a worker: {type(e).__name__}: {e}") from e
        return {TYPE: "pickle", **self._data(data)}

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        # A mapping with the key `$` would be read as a typed value.
        if all(type(key) is str and _is_unicode(key) for key in value) and TYPE not in value:
            return {key: self.plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[self.plain(key, where), self.plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {TYPE: "dict", "items": items}

    def _array(self, value: Any, where: str) -> Any:
        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS or isinstance(value, np.ma.MaskedArray):
            if isinstance(value, np.str_ | np.bytes_):
                return self.plain(value.item(), where)
            raise ConfigError(
                f"{where} is an array of {array.dtype}, which cannot be sent to a worker; send an array of numbers"
            )
        # torch accepts only the native byte order, and warns of arrays that cannot be written.
        flat = np.require(array.reshape(-1), array.dtype.newbyteorder("="), ["C", "W"])
        try:
            tensor = torch.from_numpy(flat).reshape(array.shape)
        except TypeError as e:
            raise ConfigError(f"{where} is an array of {array.dtype}, which cannot be sent to a worker: {e}") from None
        if isinstance(value, np.generic):
            return self.plain(value.item(), where)
        return {**self._tensor(tensor, where), TYPE: "array"}

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_meta:
            raise ConfigError(f"{where} is a {value.layout} tensor, which cannot be sent to a worker; send a dense tensor")
        # torch negates and conjugates lazily; until resolved, the bytes are those of the original tensor.
        host = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
        # A single element counts as contiguous whatever its stride. And the role or the caller may change a tensor before the
        # message has been sent.
        if (host.numel() and host.stride(0) != 1) or (self._copy and host.data_ptr() == value.data_ptr()):
            host = host.clone(memory_format=torch.contiguous_format)
        return {
            TYPE: "tensor",
            "dtype": _dtype_name(value.dtype, where),
            "shape": list(value.shape),
            **self._data(host.view(torch.uint8).numpy().data),
        }

    def _data(self, data: FramePart) -> dict[str, Any]:
        if self._parts is None:
            return {"data": base64.b64encode(data).decode()}
        self._parts.append(data)
        return {"part": len(self._parts) - 1}


def _is_unicode(value: str) -> bool:
    """Return whether a string can be encoded: names of files may contain lone surrogates."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dtype_name(dtype: torch.dtype, where: str) -> str:
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"{where} has the data type {dtype}, which cannot be sent to a worker; convert it first")
    return DTYPE_NAMES[dtype]


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
        if kind in ("bytes", "str"):
            data = bytes(_bytes(plain, parts))
            return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")
        if kind == "int":
            return int(plain["value"], 16)
        if kind == "float":
            return float(plain["value"])
        if kind == "complex":
            return complex(*_value(plain["items"], parts, names))
        if kind == "path":
            return Path(_value(plain["value"], parts, names))
        if kind == "dtype":
            return DTYPES[plain["value"]]
        if kind == "pickle":
            return _unpickled(plain, parts, names)
        if kind == "enum":
            return _subclass(plain["class"], Enum, names)[plain["value"]]
        if kind == "namedtuple":
            return _subclass(plain["class"], tuple, names)._make(_value(plain["items"], parts, names))
        if kind == "name":
            return names.resolve(plain["value"])
        content = {str(name): _value(item, parts, names) for name, item in plain["fields"].items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        if isinstance(e, ConfigError | ValueDecodeError):
            raise
        raise ValueDecodeError(f"{str(kind)[:80]!r} is not a value: {type(e).__name__}: {e}") from e
    return _instance(str(kind), content, names)


def _subclass(name: str, base: type, names: Names) -> Any:
    resolved = names.resolve(name)
    if not isinstance(resolved, type) or not issubclass(resolved, base):
        raise ValueDecodeError(f"{name} is not a subclass of {base.__name__}")
    return resolved


def _unpickled(plain: dict[str, Any], parts: Sequence[Any], names: Names) -> Any:
    # Only a process and its own children, which Ray started, have a pickler.
    if names.pickler is None:
        raise ValueDecodeError("pickled values are accepted only between a process and its own children")
    return names.pickler.loads(bytes(_bytes(plain, parts)))


def _instance(name: str, content: dict[str, Any], names: Names) -> Any:
    cls = names.resolve(name)
    if not isinstance(cls, type) or not is_dataclass(cls):
        raise ValueDecodeError(f"{name} is not a dataclass, so it has no fields")
    field_names = cls.setting_names() if issubclass(cls, RegistryConfig) else {f.name for f in fields(cls) if f.init}
    content = {MOVED_FIELDS.get(name, name) if name not in field_names else name: value for name, value in content.items()}
    if unknown := sorted(content.keys() - field_names):
        raise ValueDecodeError(f"{name} has no field {unknown[0]!r}")
    try:
        return cls.from_settings(**content) if issubclass(cls, RegistryConfig) else cls(**content)
    except TypeError as e:  # a required field is missing
        raise ValueDecodeError(f"{name}: {e}") from e


def _tensor(plain: dict[str, Any], parts: Sequence[Any]) -> Tensor:
    dtype, shape = DTYPES[plain["dtype"]], tuple(plain["shape"])
    data = memoryview(_bytes(plain, parts)).cast("B")
    if any(not isinstance(size, int) or size < 0 for size in shape) or data.nbytes != math.prod(shape) * dtype.itemsize:
        raise ValueDecodeError(f"a tensor of shape {list(shape)} and type {plain['dtype']} has {data.nbytes} bytes of data")
    if not data.nbytes:
        return torch.empty(shape, dtype=dtype)
    aligned = np.frombuffer(data, dtype=np.uint8).ctypes.data % dtype.itemsize == 0
    # Read-only or unaligned memory is copied, because roles may work in place.
    memory = data if aligned and not data.readonly else bytearray(data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)


def _bytes(plain: dict[str, Any], parts: Sequence[Any]) -> FramePart:
    if "data" in plain:
        return bytearray(base64.b64decode(plain["data"], validate=True))
    index = plain["part"]
    if not isinstance(index, int) or not 0 <= index < len(parts):
        raise ValueDecodeError(f"part {index!r} of {len(parts)} does not exist")
    part: FramePart = parts[index]
    return part
