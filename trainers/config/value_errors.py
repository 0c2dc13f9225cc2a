"""Messages for values that do not fit their settings."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

_KINDS = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "true or false"}
_CONVERTED = {"Integer": _KINDS["int"], "Float": _KINDS["float"], "Boolean": _KINDS["bool"]}
"""Descriptions of types, by OmegaConf's names for them."""


def value_error(error: Exception, layers: Sequence[DictConfig], types: Mapping[str, str]) -> str:
    """Describe an invalid value in terms of the settings.

    Args:
        error: OmegaConf's error.
        layers: The settings that were merged.
        types: The type of every setting, by its dotted name.
    """
    sections = {name.rpartition(".")[0] for name in types}
    for layer in layers:
        # Do not resolve interpolations, since they may be the cause of the error.
        # First look for causes that OmegaConf's message does not name, or describes in its own terms.
        for name, value in _values(OmegaConf.to_container(layer, resolve=False)):
            kind = types.get(name)
            if kind is None and name in sections:
                example = next(other for other in types if other.startswith(f"{name}."))
                return f"{name}={value}: {name} is a section with settings, such as {example}; set one of them"
            if kind is None:
                continue
            if value is None and "None" not in kind:
                expected = "a list" if kind.startswith("tuple[") else _KINDS.get(kind, kind)
                return f"{name} has no value; it must be {expected}"
            if kind.startswith("dict["):
                return f"{name}={value}; it must be a mapping, as in {name}={{name: value}}"
            if kind.startswith("tuple[") and "..." not in kind and len(value) != kind.count(",") + 1:
                return f"{name}={value}; it must be a list of {kind.count(',') + 1} values"
    # Then rewrite its message in the words of the settings.
    where = f"{full}: " if (full := getattr(error, "full_key", None)) else ""
    hint = (
        "; ${...} refers to another setting; write an environment variable as $NAME" if "Interpolation" in str(error) else ""
    )
    message = str(error).splitlines()[0]
    if where and (
        match := re.fullmatch(r"Value '(.*)' of type '\w+' could not be converted to (Integer|Float|Boolean)", message)
    ):
        return f"{full}={match[1]}; it must be {_CONVERTED[match[2]]}"
    if where and (match := re.fullmatch(r"Invalid value '(.*)', expected one of \[(.*)\]", message)):
        names = [name.strip("'") for name in match[2].split(", ")]
        close_matches = difflib.get_close_matches(match[1], names, n=1)
        return f"{full}={match[1]}; it must be one of {', '.join(names)}{f'; did you mean {close_matches[0]!r}?' if close_matches else ''}"
    parts = message.partition(" is incompatible with type hint 'Union[bool, Literal[auto]]'")
    return f"{where}{parts[0]}{'; use auto, true or false' if parts[1] else ''}{hint}"


def _values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf in plain data; nothing for an empty mapping."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
