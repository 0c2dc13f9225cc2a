"""Losses that come as data: graphs of tensor operations, as torch.fx traces them, of which only listed operations run.

A graph is run for each document on the log-probabilities of its targets and on what else it reads, and returns the loss of that document and
metrics. The form is that of custom losses of Tinker's protocol: a list of nodes with an operation, a name, a target and arguments, in which
`{"ref": name}` is the result of an earlier node. Nothing in it is code: a target is looked up in the lists of this module.

A document is computed apart from all others, with its own copies of what it reads: a graph that fails, or that returns NaN, has no effect on
other documents. Every operation is first run without data, on shapes alone: the results of all operations of a document have at most
`MOST_ELEMENTS` numbers together, and its matrix products at most `MOST_PRODUCTS` multiplications.

Axes: T tokens of a document, K targets of each.
"""

import json
import math
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
"""The largest number of elements of all results for a document, with those that broadcasting expands on the way."""
MOST_PRODUCTS = 2**30
"""The largest number of multiplications in the matrix products of a document."""
# Graphs come from clients of a service, so everything about them is bounded.
MOST_NODES = 256
MOST_INPUTS = 16
MOST_CHARACTERS = 2**18
_DEEPEST = 8
# The largest integer up to which float64, and so JSON in most languages, is exact.
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
_ATTRIBUTES = {"shape", "ndim", "dtype", "T", "mT"}
_FIELDS = {"values", "indices"}
"""What operations with two results call them."""
_KEYWORDS = set(
    _words(
        """
        alpha approximate axis base beta correction delta descending dim dims dtype end_dim exponent fill_value input keepdim keepdims
        log_target max mean min mode n nan negative_slope neginf other p posinf prepend append reduction rounding_mode self shape size
        stable start_dim sections tensor1 tensor2 tensors threshold unbiased value weight end condition mask target eps diagonal
        decimals max_val min_val _stacklevel
        """
    )
)
"""The keyword arguments that operations take here. `out`, `inplace` and `device` are not among them, unless they are None or False, as torch.fx records
defaults: the first two write to what others read."""
_MOST_POSITIONAL = {"relu": 1, "silu": 1, "elu": 2, "leaky_relu": 2, "hardtanh": 3}
"""For functions with the argument `inplace`: how many arguments come before it."""
_STRINGS = {
    "none",
    "mean",
    "sum",
    "batchmean",
    "tanh",
    "fro",
    "constant",
    "reflect",
    "replicate",
    "circular",
    "floor",
    "trunc",
}
_MOST_DIFFERENCES = 8
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
    def operations(self) -> int:
        """The number of operations that are run for each document."""
        return len(_nodes(self.graph))

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
        columns = [self._column(batch, name, rank) for name, rank in self.inputs[1:]]
        nodes = _nodes(self.graph)
        # Each document by itself, on copies of its inputs: what a graph does to one must not reach another.
        losses: list[Tensor] = []
        metrics: dict[str, tuple[Tensor, float]] = {}
        for number, (start, end) in enumerate(pairwise(batch.bounds)):
            others = [
                (column[number] if rank == 0 else column[start:end]).clone()
                for column, (_, rank) in zip(columns, self.inputs[1:], strict=True)
            ]
            try:
                loss, more = _of_document(nodes, outputs.log_probs[start:end], others)
            except Exception as e:  # operations of torch raise errors of any type on arguments that a client chose
                raise BatchError(f"loss {self.name[:80]}: {e}") from e
            losses.append(loss)
            for name, value in more.items():
                total, count = metrics.get(name, (0.0, 0.0))
                metrics[name] = total + value.detach().float(), count + 1.0
        total = torch.stack(losses).sum() if losses else outputs.log_probs.sum() * 0.0
        return LossSums(terms={"loss": total}, metrics=metrics)

    def _column(self, batch: PackedBatch, name: str, rank: int) -> Tensor:
        fields = batch.token_fields if rank else batch.sequence_fields
        column = fields.get(FIELD + name)
        if column is None or column.dim() != max(rank, 1):
            present = "nothing" if column is None else f"rank {column.dim()}"
            raise BatchError(f"loss {self.name[:80]} reads {name!r} of rank {rank}; the batch has {present}")
        return column


class _WithGradient(torch.autograd.Function):
    """A value whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.to(log_probs.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grads[0] * gradient, None, None


def _of_document(nodes: "Sequence[_Node]", log_probs: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics of a document.

    The gradient is computed here, so that an operation that fails in its backward pass fails alone.
    """
    trains = torch.is_grad_enabled() and log_probs.requires_grad
    # Cut off from the model's graph, which is run backward later, once, with the gradient that is found here.
    leaf = log_probs.detach().clone().requires_grad_(trains)
    loss, metrics = _run(nodes, [leaf, *others])
    if not trains:
        return loss.to(log_probs.dtype), metrics
    # A graph may ignore the log-probabilities; then the gradient is 0.
    gradient = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    gradient_of_leaf = torch.zeros_like(leaf) if gradient is None else gradient
    return _WithGradient.apply(log_probs, loss.detach(), gradient_of_leaf), metrics


# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# Parsed and checked once, and not for each micro-batch.
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
    # A node may refer only to nodes before it, so the graph has no cycle, and runs in a single pass.
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
            attribute = node.args[1] if len(node.args) == 2 else None
            named = isinstance(attribute, str) and attribute in _ATTRIBUTES | _FIELDS
    elif node.op == "call_method":
        named = node.target in _METHODS
    else:
        named = node.op in ("placeholder", "output")
    if not named:
        raise ConfigError(
            f"{where} is {node.op[:40]} of {node.target[:100]!r}, which is not among the operations that run here; compute the loss in the client"
        )
    if wrong := [name for name, arg in node.kwargs.items() if name not in _KEYWORDS and arg is not None and arg is not False]:
        raise ConfigError(
            f"{where} is {node.target[:100]} with the argument {str(wrong[0])[:80]!r}, which is not among those that run here"
        )
    most = _MOST_POSITIONAL.get(node.target.rpartition(".")[2], len(node.args))
    if len(node.args) > most:
        raise ConfigError(
            f"{where} is {node.target[:100]} with {len(node.args)} arguments; leave out all but the first {most}"
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
            or (kind == "dtype" and isinstance(inner, str) and inner in _DTYPES)
        ):
            raise ConfigError(f"an argument is {str(value)[:100]}, which is not among those that run here")
    elif isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ConfigError(f"the number {str(value)[:40]} is too large")


def _run(nodes: Sequence[_Node], inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a graph on the inputs of one document; return its loss and metrics."""
    results: dict[str, Any] = {}
    # One for the whole document: many small operations count as one large operation does.
    budget = _Budget()
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
        results[node.name] = _call(node, args, kwargs, budget)
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


class _Budget:
    """What a document may still compute."""

    def __init__(self) -> None:
        self.elements, self.products = MOST_ELEMENTS, MOST_PRODUCTS

    def take(self, node: _Node, elements: int, products: int = 0) -> None:
        """Count an operation.

        Raises:
            ValueError: It is too much.
        """
        self.elements -= elements
        self.products -= products
        where = f"{node.target} at {node.name[:80]!r}"
        if self.elements < 0:
            raise ValueError(
                f"{where} makes {elements} numbers, with which the results for a document have {MOST_ELEMENTS - self.elements}, "
                f"more than {MOST_ELEMENTS}"
            )
        if self.products < 0:
            raise ValueError(f"{where} multiplies {products} times, more than the {MOST_PRODUCTS} of a document leave")


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute; `values` and `indices` only of an operation with several results, since tensors have methods of these names."""
    if isinstance(value, Tensor) != (name in _ATTRIBUTES):
        raise TypeError(f"{name!r} of a {type(value).__name__}")
    return getattr(value, name)


def _function(node: _Node, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return what an operation calls.

    Raises:
        TypeError: It is called on something else than it is for.
    """
    if node.op == "call_method":
        if not args or not isinstance(args[0], Tensor):
            raise TypeError(
                f"{node.target} is a method of tensors, and is called on a {type(args[0]).__name__ if args else 'nothing'}"
            )
        if node.target == "to" and not all(isinstance(one, Tensor | torch.dtype) for one in _leaves([args, kwargs])):
            raise TypeError("`to` moves a tensor to another device, which a traced loss cannot do; pass only a dtype")
        function: Callable[..., Any] = getattr(Tensor, node.target)
        return function
    if node.target == "operator.getitem":
        _check_index(args)
        return operator.getitem
    if node.target == "getattr":
        return _attribute
    if node.target.startswith("operator.") and not all(isinstance(arg, Tensor | int | float) for arg in args):
        raise TypeError(f"{node.target} of {', '.join(type(arg).__name__ for arg in args)}; it takes tensors and numbers")
    return _FUNCTIONS[node.target]


def _check_index(args: list[Any]) -> None:
    """Refuse a mask beside other tensors in an index, with which the result can be larger than the tensor that is indexed."""
    tensors = [one for one in _leaves(args[1:]) if isinstance(one, Tensor)]
    if len(tensors) > 1 and any(one.dtype == torch.bool for one in tensors):
        raise TypeError("an index has a mask of booleans beside another tensor; index with the mask alone")


def _call(node: _Node, args: list[Any], kwargs: dict[str, Any], budget: _Budget) -> Any:
    """Run an operation, unless what it makes is too large."""
    function = _function(node, args, kwargs)
    leaves = list(_leaves([args, kwargs]))
    if wrong := [one for one in leaves if isinstance(one, str) and one not in _STRINGS and node.target != "getattr"]:
        raise TypeError(f"{node.target} at {node.name[:80]!r} with {wrong[0][:80]!r}")
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    if not tensors:
        return _call_on_numbers(node, function, args)
    kind = node.target.rpartition(".")[2]
    # The budget counts the result, and not the n operations that lead to it.
    if kind == "diff" and not 0 <= _argument(args, kwargs, 1, "n", 1) <= _MOST_DIFFERENCES:
        raise ValueError(f"diff at {node.name[:80]!r} takes differences of differences more than {_MOST_DIFFERENCES} times")
    with torch.no_grad():
        try:
            # On the meta device an operation computes the shape of its result without allocating it.
            shapes = function(*_mapped(args, _without_data), **_mapped(kwargs, _without_data))
        except NotImplementedError:
            if kind != "getitem":
                raise
            # How many elements a mask chooses depends on the data: at most all.
            shapes = args[0]
    elements = sum(one.numel() for one in _leaves(shapes) if isinstance(one, Tensor))
    if kind in ("matmul", "dot"):
        budget.take(node, *_of_product(tensors, elements))
    else:
        # These copy their arguments; other operations may expand theirs on the way to a smaller result.
        budget.take(node, elements if kind in ("getitem", "cat", "concat", "stack") else max(elements, _broadcast(tensors)))
    return function(*args, **kwargs)


def _argument(args: list[Any], kwargs: dict[str, Any], place: int, name: str, default: int) -> int:
    value = args[place] if len(args) > place else kwargs.get(name, default)
    if not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an integer")
    return value


def _broadcast(tensors: Sequence[Tensor]) -> int:
    """Return how many elements tensors have after broadcasting, which a reduction such as `mse_loss` does on the way."""
    try:
        return math.prod(torch.broadcast_shapes(*(one.shape for one in tensors)))
    except RuntimeError:
        return 0


def _of_product(tensors: Sequence[Tensor], elements: int) -> tuple[int, int]:
    """Return the elements and the multiplications of a product of `[..., m, k]` and `[..., k, n]`; each is copied for what it is broadcast to."""
    if len(tensors) != 2 or not all(one.dim() for one in tensors):
        return elements, 0
    left, right = tensors
    m, k, n = left.shape[-2] if left.dim() > 1 else 1, left.shape[-1], right.shape[-1] if right.dim() > 1 else 1
    batch = math.prod(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]))
    copied = batch * (m * k + k * n) if max(left.dim(), right.dim()) > 2 else 0
    return elements + copied, batch * m * k * n


def _call_on_numbers(node: _Node, function: Callable[..., Any], args: list[Any]) -> Any:
    """Run an operation on sizes, which nothing makes larger than numbers are."""
    if node.target == "operator.getitem" and isinstance(args[0], tuple | list):
        return operator.getitem(*args)
    if (
        not node.target.startswith("operator.")
        # A power is refused, because it may be too large to compute before its size could be checked.
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
        # Subclasses, such as torch.Size and the results of `sort`, are passed on as they are.
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
