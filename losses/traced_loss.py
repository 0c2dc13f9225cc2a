"""Losses that come as data: graphs of tensor operations, as torch.fx traces them, of which only listed operations run.

A graph is run for each document on the log-probabilities of its targets and on what else it reads, and returns the loss of that document and
metrics. The form is that of custom losses of Tinker's protocol: a list of nodes with an operation, a name, a target and arguments, in which
`{"ref": name}` is the result of an earlier node. Nothing in it is code: a target is looked up in the lists of this module.

Every operation is first run without data, on shapes alone, so that none makes a tensor that is larger than `MOST_ELEMENTS`.

Axes: T tokens of a document, K targets of each.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.errors import BatchError, ConfigError
from ..engine.loss import LossSums, OutputRequest, TokenOutputs, loss_mask
from ..engine.packing.batch import PackedBatch

LOG_PROBS = "logprobs"
"""The name of the first input."""
FIELD = "input_"
"""What the names of the fields of a batch begin with that hold the other inputs."""
MOST_ELEMENTS = 2**24
MOST_NODES = 256
MOST_INPUTS = 16
MOST_CHARACTERS = 2**18
_DEEPEST = 8
_LARGEST_INTEGER = 2**53
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


def _words(text: str) -> list[str]:
    return text.split()


_OPERATORS = _words("add sub mul truediv floordiv mod pow eq ne lt le gt ge and_ or_ xor matmul neg pos abs invert")
_OF_TENSORS = _words(
    """
    abs add all amax amin any ceil clamp clamp_max clamp_min clip cos cumprod cumsum detach diff div eq erf erfc exp expm1
    flatten floor floor_divide fmod ge gt isfinite isinf isnan le log log10 log1p log2 log_softmax logaddexp logical_and
    logical_not logical_or logical_xor logsumexp lt masked_fill max maximum mean median min minimum mul nan_to_num ne neg
    norm pow prod reciprocal relu remainder reshape round rsqrt sigmoid sign sin sinh softmax sort sqrt square squeeze std
    sub sum tanh tril triu true_divide trunc unsqueeze var where xlogy
    """
)
"""What is both a function of torch and a method of tensors, as far as it is."""
_FUNCTIONS_ALONE = _words("cat concat dot full_like lerp ones_like stack zeros_like")
_METHODS_ALONE = _words("bool clone contiguous dim double float int long numel size t to type_as view view_as")
_FUNCTIONAL = _words(
    """
    elu gelu hardtanh huber_loss kl_div l1_loss leaky_relu log_softmax logsigmoid mse_loss pad relu sigmoid silu
    smooth_l1_loss softmax softplus softsign tanh
    """
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"torch.{name}": getattr(torch, name) for name in [*_OF_TENSORS, *_FUNCTIONS_ALONE] if hasattr(torch, name)},
    **{f"torch.nn.functional.{name}": getattr(F, name) for name in _FUNCTIONAL},
    # As torch.fx calls those of them that are not written in Python.
    **{f"torch._C._nn.{getattr(F, name).__name__}": getattr(F, name) for name in _FUNCTIONAL},
    "abs": operator.abs,
}
_METHODS = {name for name in [*_OF_TENSORS, *_METHODS_ALONE] if hasattr(Tensor, name)}
_ATTRIBUTES = {"shape", "ndim", "T", "mT"}
_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool", "float", "double", "long", "int")
}


@dataclass(frozen=True)
class TracedLoss:
    """A loss by a graph, a sum over documents.

    Args:
        name: What it is called, for messages.
        inputs: The name and the rank of each input in order: first `logprobs`, of rank 1 (`[T]`) or 2 (`[T, K]`), then what else it reads, of
            rank 0 (a number for each document), 1 or 2. The fields of a batch that hold them are called `input_NAME`.
        graph: The nodes, in JSON.

    Raises:
        ConfigError: It is not such a graph, or has an operation that is not on the list.
    """

    name: str
    inputs: tuple[tuple[str, int], ...]
    graph: str
    request: ClassVar[OutputRequest] = OutputRequest(log_probs=True)
    linear: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names = [name for name, _ in self.inputs]
        if not 0 < len(names) <= MOST_INPUTS or names[0] != LOG_PROBS or len(set(names)) < len(names):
            raise ConfigError(
                f"the loss has the inputs {names[:20]}; it must have {LOG_PROBS} first, and at most {MOST_INPUTS}, each once"
            )
        for name, rank in self.inputs:
            if not _INPUT.fullmatch(name) or rank not in ((1, 2) if name == LOG_PROBS else (0, 1, 2)):
                raise ConfigError(
                    f"the input {name[:80]!r} of rank {rank}; names are of lower case, and ranks 0, 1 or 2 ({LOG_PROBS}: 1 or 2)"
                )
        nodes = _nodes(self.graph)
        placeholders = [node.name for node in nodes if node.op == "placeholder"]
        if len(placeholders) != len(names):
            raise ConfigError(f"the graph has {len(placeholders)} inputs, and {len(names)} are declared")

    @property
    def token_fields(self) -> frozenset[str]:
        """The fields with a number or several for each token that it reads."""
        return frozenset(FIELD + name for name, rank in self.inputs[1:] if rank)

    @property
    def sequence_fields(self) -> frozenset[str]:
        """The fields with a number for each document that it reads."""
        return frozenset(FIELD + name for name, rank in self.inputs[1:] if not rank)

    def tokens(self, batch: PackedBatch) -> Tensor:
        """Return the mask of the tokens with a label."""
        return loss_mask(batch)

    def weights(self, batch: PackedBatch) -> Mapping[str, float]:
        """Return 1: the sum is not divided."""
        return {"loss": 1.0}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        """Return the sum over documents, and the sum of each metric with the number of documents.

        Raises:
            BatchError: The batch lacks an input, an input has another rank, or an operation fails.
        """
        assert outputs.log_probs is not None
        if outputs.log_probs.dim() != self.inputs[0][1]:
            raise BatchError(
                f"loss {self.name[:80]} declares {LOG_PROBS} of rank {self.inputs[0][1]}; the targets of the batch have rank "
                f"{outputs.log_probs.dim()}"
            )
        columns = [outputs.log_probs, *(self._column(batch, name, rank) for name, rank in self.inputs[1:])]
        nodes = _nodes(self.graph)
        losses: list[Tensor] = []
        metrics: dict[str, tuple[Tensor, float]] = {}
        for number, (start, end) in enumerate(pairwise(batch.bounds)):
            values = [
                column[number] if rank == 0 else column[start:end]
                for column, (_, rank) in zip(columns, self.inputs, strict=True)
            ]
            try:
                loss, more = _run(nodes, values)
            except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as e:
                raise BatchError(f"loss {self.name[:80]}: {e}") from e
            losses.append(loss)
            for name, value in more.items():
                total, count = metrics.get(name, (0.0, 0.0))
                metrics[name] = total + value.detach().float(), count + 1.0
        total = torch.stack(losses).sum() if losses else outputs.log_probs.sum() * 0.0
        return LossSums(terms={"loss": total.to(outputs.log_probs.dtype)}, metrics=metrics)

    def _column(self, batch: PackedBatch, name: str, rank: int) -> Tensor:
        fields = batch.token_fields if rank else batch.sequence_fields
        column = fields.get(FIELD + name)
        if column is None or column.dim() != max(rank, 1):
            present = "nothing" if column is None else f"rank {column.dim()}"
            raise BatchError(f"loss {self.name[:80]} reads {name!r} of rank {rank}; the batch has {present}")
        return column


# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@lru_cache(64)
def _nodes(graph: str) -> tuple[_Node, ...]:
    """Return the nodes of a graph.

    Raises:
        ConfigError: It is not a graph, or has an operation that is not on the list.
    """
    if len(graph) > MOST_CHARACTERS:
        raise ConfigError(f"the graph has {len(graph)} characters, more than {MOST_CHARACTERS}")
    try:
        rows = json.loads(graph)
        nodes = tuple(
            _Node(
                str(row["op"]), str(row["name"]), str(row["target"]), tuple(row.get("args", ())), dict(row.get("kwargs", {}))
            )
            for row in rows
        )
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ConfigError(f"the graph is not a list of nodes: {type(e).__name__}: {str(e)[:200]}") from e
    if not 0 < len(nodes) <= MOST_NODES:
        raise ConfigError(f"the graph has {len(nodes)} nodes; it must have from 1 to {MOST_NODES}")
    seen: set[str] = set()
    for node in nodes:
        _check(node, seen)
        seen.add(node.name)
    if len(seen) != len(nodes) or [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise ConfigError("the graph must end with its one output, and no two nodes may have one name")
    output = nodes[-1].args
    pair = output[0].get("tuple") if len(output) == 1 and isinstance(output[0], dict) else None
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[1], dict) or "dict" not in pair[1]:
        raise ConfigError("the graph must return (loss, metrics), of which the latter is a dict")
    if wrong := [name for name in pair[1]["dict"] if not _METRIC.fullmatch(name)]:
        raise ConfigError(f"the metric {str(wrong[0])[:100]!r} must be called custom/NAME:sum or custom/NAME:mean")
    return nodes


def _check(node: _Node, seen: set[str]) -> None:
    where = f"node {node.name[:80]!r}"
    if node.op == "call_function":
        # An attribute of a tensor is traced as a call of getattr.
        named = node.target in _FUNCTIONS or node.target in ("getattr", "operator.getitem")
        if node.target == "getattr":
            named = len(node.args) == 2 and node.args[1] in _ATTRIBUTES
    elif node.op == "call_method":
        named = node.target in _METHODS
    else:
        named = node.op in ("placeholder", "output")
    if not named:
        raise ConfigError(
            f"{where} is {node.op[:40]} of {node.target[:100]!r}, which is not among the operations that run here; compute the loss in the client"
        )
    if unknown := [name for name in _refs([*node.args, *node.kwargs.values()], 0) if name not in seen]:
        raise ConfigError(f"{where} uses {str(unknown[0])[:80]!r}, which is not a node before it")


def _refs(value: Any, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise ConfigError(f"the arguments of a node are nested more than {_DEEPEST} deep")
    if isinstance(value, list | tuple):
        for one in value:
            yield from _refs(one, depth + 1)
    elif isinstance(value, dict):
        if len(value) != 1:
            raise ConfigError(f"an argument has the keys {list(value)[:5]}; it must have one that says what it is")
        ((kind, inner),) = value.items()
        if kind == "ref":
            yield str(inner)
        elif kind == "dict" and isinstance(inner, dict):
            yield from _refs(list(inner.values()), depth + 1)
        elif kind in ("tuple", "slice") and isinstance(inner, list):
            yield from _refs(inner, depth + 1)
        elif not (
            (kind == "ellipsis" and inner is True)
            or (kind == "float" and inner in ("inf", "-inf", "nan"))
            or (kind == "dtype" and inner in _DTYPES)
        ):
            raise ConfigError(f"an argument is {str(value)[:100]}, which is not among those that run here")
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ConfigError(f"the number {str(value)[:40]} is too large")


def _run(nodes: Sequence[_Node], inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a graph on the inputs of one document; return its loss and metrics."""
    results: dict[str, Any] = {}
    waiting = iter(inputs)
    for node in nodes:
        if node.op == "placeholder":
            results[node.name] = next(waiting)
            continue
        args = [_value(arg, results) for arg in node.args]
        kwargs = {name: _value(arg, results) for name, arg in node.kwargs.items()}
        if node.op == "output":
            loss, metrics = args[0]
            return _scalar(loss, "the loss"), {name: _scalar(value, name) for name, value in metrics.items()}
        results[node.name] = _call(node, args, kwargs)
    raise AssertionError("unreachable")


def _scalar(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.dim():
        raise ValueError(
            f"{name} is {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}; it must be a scalar tensor"
        )
    return value


def _value(arg: Any, results: Mapping[str, Any]) -> Any:
    if isinstance(arg, list):
        return [_value(one, results) for one in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, inner),) = arg.items()
    if kind == "ref":
        return results[inner]
    if kind == "tuple":
        return tuple(_value(one, results) for one in inner)
    if kind == "dict":
        return {name: _value(one, results) for name, one in inner.items()}
    if kind == "slice":
        return slice(*(_value(one, results) for one in inner))
    if kind == "ellipsis":
        return ...
    return float(inner) if kind == "float" else _DTYPES[inner]


def _call(node: _Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation, unless what it makes is too large."""
    if node.op == "call_method":
        if not args or not isinstance(args[0], Tensor):
            raise TypeError(
                f"{node.target} is a method of tensors, and is called on a {type(args[0]).__name__ if args else 'nothing'}"
            )
        if node.target == "to" and any(isinstance(one, str) for one in _leaves([args, kwargs])):
            raise TypeError("`to` another device; give it a dtype")
        function: Callable[..., Any] = getattr(Tensor, node.target)
    elif node.target == "operator.getitem":
        function = operator.getitem
    elif node.target == "getattr":
        function = getattr
    else:
        function = _FUNCTIONS[node.target]
        if node.target.startswith("operator.") and not all(isinstance(arg, Tensor | int | float) for arg in args):
            raise TypeError(f"{node.target} of {', '.join(type(arg).__name__ for arg in args)}; it takes tensors and numbers")
    if not any(isinstance(one, Tensor) for one in _leaves([args, kwargs])):
        return _call_on_numbers(node, function, args)
    with torch.no_grad():
        try:
            shapes = function(*_mapped(args, _without_data), **_mapped(kwargs, _without_data))
        except NotImplementedError:
            # A choice of elements, of which there are at most as many as there were.
            shapes = args[0]
    largest = max((one.numel() for one in _leaves(shapes) if isinstance(one, Tensor)), default=0)
    if largest > MOST_ELEMENTS:
        raise ValueError(f"{node.target} at {node.name[:80]!r} makes {largest} numbers, more than {MOST_ELEMENTS}")
    return function(*args, **kwargs)


def _call_on_numbers(node: _Node, function: Callable[..., Any], args: list[Any]) -> Any:
    """Run an operation on sizes, which nothing makes larger than numbers are."""
    if node.target == "operator.getitem" and isinstance(args[0], tuple | list):
        return operator.getitem(*args)
    if (
        not node.target.startswith("operator.")
        or node.target == "operator.pow"
        or not all(isinstance(a, int | float) for a in args)
    ):
        raise TypeError(f"{node.target} at {node.name[:80]!r} has no tensor among its arguments")
    result = function(*args)
    if isinstance(result, int) and abs(result) > _LARGEST_INTEGER:
        raise ValueError(f"{node.target} at {node.name[:80]!r} makes a number that is too large")
    return result


def _without_data(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, Tensor) else value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, change) for one in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _mapped(one, change) for name, one in value.items()}
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
