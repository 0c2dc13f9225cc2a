"""A calculator as a tool."""

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .tools import ToolEnvironment, text_argument, tool

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name) for name in ("sqrt", "exp", "log", "log10", "sin", "cos", "tan", "floor", "ceil")
} | {"abs": abs, "min": min, "max": max, "round": round}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_LONGEST = 500
"""The maximum number of characters in an expression."""
_LARGEST = 10**60
"""The largest absolute value of an integer, so that powers stay cheap to compute."""


class CalculatorEnvironment(ToolEnvironment):
    """An environment whose policy may call `calculate` with an arithmetic expression."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The calculator."""
        return (tool("calculate", "Compute an expression of arithmetic.", expression="such as (3 + 4) * 2 ** 3 / sqrt(2)"),)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Compute an expression."""
        return calculate(text_argument(arguments, "expression"))


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as a string.

    Args:
        expression: Numbers, `+ - * / // % **`, parentheses, a few functions, `pi` and `e`.

    Raises:
        ValueError: It is not an arithmetic expression, or has no finite value.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST} are computed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r:.60} is not an arithmetic expression") from None
    # Python's parser raises RecursionError or MemoryError if an expression is nested too deeply.
    except (ZeroDivisionError, OverflowError, TypeError, RecursionError, MemoryError) as e:
        raise ValueError(f"{expression!r:.60} has no value: {type(e).__name__}: {e}") from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{expression!r:.60} has no finite value")
        return format(value, ".12g")
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    # Python reads 1,000 as a tuple.
    if isinstance(node, ast.Tuple):
        raise ValueError("a number is written without commas")
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        if isinstance(node.op, ast.BitXor):
            raise ValueError("a power is written with **, not with ^")
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _bounded(_FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args)))
    raise ValueError(f"{ast.unparse(node)!r:.60} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and abs(base) > 1:
        # Compared as logarithms, because computing a huge power could take hours.
        if exponent * math.log10(abs(base)) > math.log10(_LARGEST):
            raise ValueError("a number is too large")
        return int(base**exponent)
    value = (
        float(base) ** float(exponent)
        if exponent < 0 or isinstance(base, float) or isinstance(exponent, float)
        else base**exponent
    )
    if isinstance(value, complex):
        raise ValueError("a root of a negative number is not real")
    return value  # type: ignore[no-any-return]


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError("a number is too large")
    if not isinstance(value, int | float):
        raise ValueError(f"{value!r:.40} is not a number")
    return value
