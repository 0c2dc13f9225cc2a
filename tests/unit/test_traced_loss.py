"""Losses that come as graphs: traced functions have their own values and gradients, and nothing but listed operations runs."""

import json
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.errors import BatchError, ConfigError
from drivetrain.engine.loss import TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.losses import traced_loss as module
from drivetrain.losses.traced_loss import TracedLoss

tinker = pytest.importorskip("tinker", reason="the client of Tinker's protocol is not installed")
LENGTHS = (3, 1, 5)


def traced(function: Callable[..., Any], **ranks: Any) -> TracedLoss:
    """A function as the client traces and encodes it."""
    from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

    handle = trace_loss(function, ranks, "session")
    graph = json.dumps([node.model_dump() for node in encode_graph(handle).nodes])
    return TracedLoss(handle.name, tuple((one.name, one.rank) for one in handle.inputs), graph)


def batch_of(*, several: int = 0, **fields: Tensor) -> PackedBatch:
    total = sum(LENGTHS)
    token_fields = {f"input_{name}": value for name, value in fields.items() if len(value) == total}
    sequence_fields = {f"input_{name}": value for name, value in fields.items() if len(value) == len(LENGTHS)}
    if several:
        token_fields["targets"] = torch.ones(total, several, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.ones(total, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0),
        labels=torch.ones(total, dtype=torch.int64),
        token_fields=token_fields,
        sequence_fields=sequence_fields,
        free_labels=True,
    )


def clipped(logprobs: Any, advantages: Any, old: Any, mask: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 0.8, max=1.2) * advantages
    values = -torch.minimum(ratio * advantages, bounded).where(mask > 0, 0.0)
    hits = ((ratio - 1).abs() > 0.2).float()
    return values.sum() / mask.sum().clamp(min=1), {"custom/clipped:mean": hits.mean(), "custom/tokens:sum": mask.sum()}


def of_several(logprobs: Any, weights: Any, scale: Any) -> Any:
    best = F.softmax(weights, dim=-1)
    kl = (best * (best.log() - logprobs.log_softmax(-1))).sum(-1)
    last = kl[-1] + kl[..., 0] * 2.0 - F.logsigmoid(-logprobs[:, 0]).mean()
    return (scale * (kl.sum() + last)) / kl.shape[0], {"custom/kl:mean": kl.mean()}


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, int], dict[str, Tensor], int]] = {}
_random = torch.Generator().manual_seed(0)
_total = sum(LENGTHS)
FUNCTIONS["clipped"] = (
    clipped,
    {"logprobs": 1, "advantages": 1, "old": 1, "mask": 1},
    {
        "advantages": torch.randn(_total, generator=_random, dtype=torch.float64),
        "old": torch.randn(_total, generator=_random, dtype=torch.float64),
        "mask": torch.tensor([1, 0, 1, 1, 1, 1, 0, 0, 1]),
    },
    0,
)
FUNCTIONS["of several"] = (
    of_several,
    {"logprobs": 2, "weights": 2, "scale": 0},
    {
        "weights": torch.randn(_total, 4, generator=_random, dtype=torch.float64),
        "scale": torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64),
    },
    4,
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_has_the_values_and_gradients_of_the_function(name: str) -> None:
    function, ranks, fields, several = FUNCTIONS[name]
    loss, batch = traced(function, **ranks), batch_of(several=several, **fields)
    shape = (_total, several) if several else (_total,)
    log_probs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sums = loss(TokenOutputs(mask=torch.ones(_total, dtype=torch.bool), log_probs=log_probs), batch)
    (gradient,) = torch.autograd.grad(sums.terms["loss"], log_probs)
    total, metrics = torch.zeros((), dtype=torch.float64), dict.fromkeys(sums.metrics, 0.0)
    start = 0
    for number, length in enumerate(LENGTHS):
        rows = slice(start, start + length)
        inputs = [value[number] if ranks[key] == 0 else value[rows] for key, value in fields.items()]
        one, more = function(log_probs[rows], *inputs)
        total = total + one
        metrics = {key: metrics[key] + float(value) for key, value in more.items()}
        start += length
    torch.testing.assert_close(sums.terms["loss"], total)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, log_probs)[0])
    for key, (value, count) in sums.metrics.items():
        assert float(value) == pytest.approx(metrics[key], rel=1e-6)
        assert count == len(LENGTHS)


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


X = {"ref": "x"}
INPUT = node("placeholder", "x", "logprobs")


def graph(*nodes: dict[str, Any], result: str = "y") -> TracedLoss:
    output = node("output", "output", "output", {"tuple": [{"ref": result}, {"dict": {}}]})
    return TracedLoss("mine", (("logprobs", 1),), json.dumps([INPUT, *nodes, output]))


@pytest.mark.parametrize(
    "bad",
    [
        node("call_function", "y", "os.system", "true"),
        node("call_function", "y", "torch.load", "file"),
        node("call_function", "y", "torch.ones", 10**12),
        node("call_function", "y", "builtins.eval", "1"),
        node("call_function", "y", "getattr", X, "__class__"),
        node("call_function", "y", "getattr", X, "grad_fn"),
        node("call_method", "y", "backward", X),
        node("call_method", "y", "__reduce__", X),
        node("call_method", "y", "register_hook", X, X),
        node("call_method", "y", "add_", X, 1),
        node("call_method", "y", "expand", X, 10**9),
        node("call_method", "y", "item", X),
        node("get_attr", "y", "weights"),
        node("call_module", "y", "layer", X),
        node("call_function", "y", "torch.exp", {"ref": "later"}),
        node("call_function", "y", "torch.exp", {"device": "cuda"}),
        node("call_function", "y", "torch.exp", {"dtype": "float16"}),
        node("call_function", "y", "torch.add", X, 10**30),
        # What writes to tensors that others read, or to another device.
        node("call_function", "y", "torch.add", X, 0, out=X),
        node("call_function", "y", "torch.nn.functional.relu", X, inplace=True),
        node("call_function", "y", "torch.nn.functional.relu", X, True),
        node("call_function", "y", "torch.nn.functional.leaky_relu", X, 0.1, True),
        node("call_function", "y", "torch.zeros_like", X, device="meta"),
        node("call_function", "y", "torch.zeros_like", X, requires_grad=True),
        node("call_function", "y", "getattr", X, ["T"]),
        node("call_function", "y", "torch.exp", {"dtype": ["float32"]}),
    ],
)
def test_what_is_not_on_the_list_is_refused_before_it_runs(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        graph(bad)


def run(loss: TracedLoss, length: int = 5) -> None:
    batch = PackedBatch(
        input_ids=torch.ones(length, dtype=torch.int64),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length]),
        labels=torch.ones(length, dtype=torch.int64),
        free_labels=True,
    )
    loss(TokenOutputs(mask=torch.ones(length, dtype=torch.bool), log_probs=torch.randn(length)), batch)


def test_nothing_large_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By operations that would need a terabyte, of which each is small as it is written."""
    column = node("call_method", "c", "unsqueeze", X, -1)
    product = node("call_function", "p", "operator.mul", X, {"ref": "c"})
    total = node("call_method", "y", "sum", {"ref": "p"})
    run(graph(column, product, total), 100)
    with pytest.raises(BatchError, match="more than 16777216"):
        run(graph(column, product, total), 5000)
    doubled = [node("call_function", "x0", "torch.cat", [X] * 8)]
    doubled += [node("call_function", f"x{i}", "torch.cat", [{"ref": f"x{i - 1}"}] * 8) for i in range(1, 20)]
    with pytest.raises(BatchError, match="more than 16777216"):
        run(graph(*doubled, node("call_method", "y", "sum", {"ref": "x19"})))
    with pytest.raises(BatchError, match="more than 16777216"):
        run(
            graph(
                node("call_function", "w", "torch.nn.functional.pad", X, {"tuple": [0, 10**11]}),
                node("call_method", "y", "sum", {"ref": "w"}),
            )
        )
    size = node("call_method", "n", "numel", X)
    powers = [
        node("call_function", f"n{i}", "operator.mul", {"ref": f"n{i - 1}" if i else "n"}, {"ref": f"n{i - 1}" if i else "n"})
        for i in range(40)
    ]
    with pytest.raises(BatchError, match="too large"):
        run(graph(size, *powers, node("call_function", "y", "operator.mul", X, {"ref": "n39"})))
    with pytest.raises(BatchError, match="takes tensors and numbers"):
        run(graph(node("call_function", "y", "operator.mul", [1, 2], 10**9)))
    with pytest.raises(BatchError, match="no tensor among"):
        run(graph(node("call_function", "y", "operator.pow", 10, 10**9)))
    with pytest.raises(BatchError, match="pass only a dtype"):
        run(graph(node("call_method", "z", "to", X, "meta"), node("call_method", "y", "sum", {"ref": "z"})))
    with pytest.raises(BatchError, match="must be a scalar tensor"):
        run(graph(node("call_method", "y", "exp", X)))
    # As the shapes say: the check is what stands before the operation.
    monkeypatch.setattr(module, "MOST_ELEMENTS", 3)
    with pytest.raises(BatchError, match="more than 3"):
        run(graph(node("call_method", "z", "exp", X), node("call_method", "y", "sum", {"ref": "z"})))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        # Many results, of which each is small enough.
        ([node("call_method", f"d{i}", "double", X) for i in range(200)], "more than 16777216"),
        # Reductions and products that broadcast on the way.
        (
            [
                node("call_method", "c", "unsqueeze", X, -1),
                node("call_function", "z", "torch.nn.functional.mse_loss", X, {"ref": "c"}),
            ],
            "more than 16777216",
        ),
        (
            [
                node("call_method", "a", "reshape", X, 2000, 1, 1, 50),
                node("call_method", "b", "reshape", X, 1, 2000, 50, 1),
                node("call_function", "z", "operator.matmul", {"ref": "a"}, {"ref": "b"}),
            ],
            "more than 16777216",
        ),
        (
            [
                node("call_method", "f", "reshape", X, 1000, 100),
                node("call_function", "g", "getattr", {"ref": "f"}, "T"),
                node("call_function", "h", "operator.matmul", {"ref": "f"}, {"ref": "g"}),
                *(node("call_function", f"p{i}", "operator.matmul", {"ref": "h"}, {"ref": "h"}) for i in range(3)),
            ],
            "multiplies 1000000000 times, more than",
        ),
        ([node("call_function", "z", "torch.diff", X, 10**6)], "more than 8 times"),
        ([node("call_method", "z", "diff", X, n=9)], "more than 8 times"),
        (
            [
                node("call_function", "m", "operator.lt", X, 0),
                node("call_method", "i", "long", X),
                node("call_function", "z", "operator.getitem", X, {"tuple": [{"ref": "m"}, {"ref": "i"}]}),
            ],
            "beside another tensor",
        ),
        ([node("call_method", "z", "norm", X, "nuc")], "with 'nuc'"),
    ],
)
def test_no_document_computes_without_bound(nodes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        run(graph(*nodes, node("call_method", "y", "sum", {"ref": nodes[-1]["name"]})), 100_000)


def test_documents_are_computed_apart() -> None:
    """A document whose loss is NaN, constant, or an error in its backward pass leaves the gradients of the others as they are."""
    for function in (
        lambda x: x[x < -0.5].max(),
        lambda x: torch.sort(x).values[0] + torch.max(x, 0).indices.to(x.dtype) * 0,
        lambda x: (x * 0).sum() / 0,
        lambda x: (x > 0).sum(),
    ):

        def with_metrics(logprobs: Any) -> Any:
            return function(logprobs), {}  # noqa: B023, the trace is made before the next one

        loss = traced(with_metrics, logprobs=1)
        leaf = (-1 - torch.rand(_total)).requires_grad_()
        sums = loss(TokenOutputs(mask=torch.ones(_total, dtype=torch.bool), log_probs=leaf), batch_of())
        (gradient,) = torch.autograd.grad(sums.terms["loss"], leaf)
        value, start = torch.zeros(()), 0
        expected = torch.zeros(_total)
        for length in LENGTHS:
            one = leaf.detach()[start : start + length].clone().requires_grad_()
            result = function(one)
            value = value + result.detach()
            if result.requires_grad:
                (expected[start : start + length],) = torch.autograd.grad(result, one)
            start += length
        torch.testing.assert_close(sums.terms["loss"].detach(), value, equal_nan=True)
        torch.testing.assert_close(gradient, expected, equal_nan=True)


def test_a_graph_that_is_none() -> None:
    deep: Any = X
    for _ in range(40):
        deep = [deep]
    output = node("output", "output", "output", {"tuple": [X, {"dict": {}}]})
    for nodes, message in (
        ("nonsense", "not a list of nodes"),
        ("[]", "from 1 to 256"),
        ([INPUT] * 2, "must end with its one output"),
        ([INPUT], "must end with its one output"),
        ([INPUT, node("output", "output", "output", X)], "must return"),
        ([INPUT, node("call_function", "y", "torch.stack", deep), output], "nested"),
        ([INPUT, *(node("call_method", f"n{i}", "exp", X) for i in range(300)), output], "from 1 to 256"),
        ([INPUT, node("output", "output", "output", {"tuple": [X, {"dict": {"loss:sum": X}}]})], "custom/NAME"),
        ([node("placeholder", "x", "logprobs"), node("placeholder", "z", "more"), output], "2 inputs, and 1 are declared"),
    ):
        text = nodes if isinstance(nodes, str) else json.dumps(nodes)
        with pytest.raises(ConfigError, match=message):
            TracedLoss("mine", (("logprobs", 1),), text)
    for inputs in ((), (("weights", 1),), (("logprobs", 0),), (("logprobs", 1), ("Bad", 1)), (("logprobs", 1), ("a", 3))):
        with pytest.raises(ConfigError):
            TracedLoss("mine", inputs, json.dumps([INPUT, output]))


def test_the_batch_has_to_have_what_the_loss_reads() -> None:
    def weighted(logprobs: Any, weights: Any) -> Any:
        return operator.neg((logprobs * weights).sum()), {}

    loss = traced(weighted, logprobs=1, weights=1)
    outputs = TokenOutputs(mask=torch.ones(_total, dtype=torch.bool), log_probs=torch.randn(_total))
    with pytest.raises(BatchError, match="reads 'weights' of rank 1; the batch has nothing"):
        loss(outputs, batch_of())
    with pytest.raises(BatchError, match="the batch has rank 2"):
        loss(outputs, batch_of(weights=torch.ones(_total, 2)))
    wide = TokenOutputs(mask=torch.ones(_total, dtype=torch.bool), log_probs=torch.randn(_total, 2))
    with pytest.raises(BatchError, match="declares logprobs of rank 1"):
        loss(wide, batch_of(weights=torch.ones(_total)))
    assert loss.token_fields == {"input_weights"}
    assert not loss.sequence_fields
