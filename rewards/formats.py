"""Rewards for the format of a completion."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any


def check_format(completion: str, *, tags: Sequence[str] = ("think", "answer"), regex: str = "") -> float:
    """Return 1 if a completion has the required format; otherwise 0.

    Args:
        completion: The text of the completion.
        tags: The tags of the parts that it must consist of, in this order, each once, such as `<think>...</think>`, with only
            whitespace around them.
        regex: A pattern that the whole text must match, instead of tags.
    """
    if regex:
        return float(_pattern(regex).fullmatch(completion) is not None)
    if any(completion.count(f"<{tag}>") != 1 or completion.count(f"</{tag}>") != 1 for tag in tags):
        return 0.0
    parts = r"\s*".join(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags)
    return float(_pattern(rf"\s*{parts}\s*").fullmatch(completion) is not None)


def check_json(completion: str, *, schema: Mapping[str, Any] | str = "{}") -> float:
    """Return 1 if a completion is JSON that matches a schema; otherwise 0. A fence of three backticks around it is allowed.

    Args:
        completion: The text of the completion.
        schema: The JSON schema, as an object or a string; a column of this name provides one per row.

    Raises:
        ValueError: The schema is not a JSON schema.
    """
    from jsonschema import SchemaError, ValidationError
    from jsonschema.validators import validator_for

    parsed_schema = json.loads(schema) if isinstance(schema, str) else schema
    validator = validator_for(parsed_schema)
    try:
        validator.check_schema(parsed_schema)
    except SchemaError as e:
        raise ValueError(f"the schema is invalid: {e.message}") from e
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", completion, re.DOTALL)
    try:
        validator(parsed_schema).validate(json.loads(fenced.group(1) if fenced else completion, parse_constant=_refuse))
    except (ValueError, RecursionError, ValidationError):
        return 0.0
    return 1.0


def _refuse(name: str) -> None:
    # Called for NaN and the infinities, which Python's parser accepts by default.
    raise ValueError(f"{name} is not JSON")


@lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)
