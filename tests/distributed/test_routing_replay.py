"""Routes of mixtures are recorded and replayed, in every layout, exactly as plain transformers would go along them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import BatchError, ConfigError, ModelError
from drivetrain.engine.hf.routers import follow, record_routers, router_biases
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.ops.expert_routes import ExpertRoutes, RouterShape, check_routes, route_numbers
from drivetrain.engine.ops.packed_context import PackedContext
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.losses.sft import SFTLoss
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from helpers.engines import build
from helpers.harness import run_ranks
from helpers.routes import RoutedReference, documents_of, routes_of, with_routes

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
EXPERTS = 4
Results = list[tuple[float, float, float, float]]


def routes_for(documents: list[list[int]], layers: int) -> list[Tensor]:
    # The fourth answer's prompt was routed otherwise, so that it shares nothing.
    return [routes_of(d, layers, EXPERTS, 2, salt=i == 3) for i, d in enumerate(documents)]


def run(folder: str, settings: dict[str, Any], spoil: str = "") -> Results:
    """Loss, gradient norm, mismatch and shared tokens of two steps."""
    engine = build(folder, optim=OPTIM, **{"share_prefixes": "on", **settings})
    layers = engine.routers.layers if engine.routers is not None else 0
    results: Results = []
    for step in range(2):
        documents = documents_of(step)
        routes = routes_for(documents, layers)
        if spoil == "layers":
            routes = [r.flip(1) for r in routes]
        groups = [i % 2 for i in range(6)] + [2, 3]
        topology = engine.topology
        mine = balance([len(d) for d in documents], topology.dp_size, groups=groups)[topology.dp_rank]
        batch = with_routes([documents[i] for i in mine], [routes[i] for i in mine])
        if spoil == "none":
            batch = from_lists([documents[i] for i in mine])
        result = engine.train_batch(batch, SFTLoss())
        assert result.grad_norm is not None
        mismatch = result.metrics.get("routing_mismatch", -1.0)
        results.append((result.loss, result.grad_norm, mismatch, result.shared_tokens / result.tokens))
    engine.close()
    return results


def reference(folder: Path) -> list[tuple[float, float]]:
    plain = RoutedReference(folder, OPTIM)
    results = []
    for step in range(2):
        documents = documents_of(step)
        plain.routes = {tuple(d): r for d, r in zip(documents, routes_for(documents, plain.count), strict=True)}
        done = plain.step(documents)
        results.append((done.loss, done.grad_norm))
    return results


def check(results: Results, expected: list[tuple[float, float]], *, shared: bool = True) -> None:
    for (loss, norm, mismatch, saved), (want_loss, want_norm) in zip(results, expected, strict=True):
        assert abs(loss - want_loss) <= 1e-6 * want_loss, (results, expected)
        assert abs(norm - want_norm) <= 1e-5 * want_norm, (results, expected)
        assert 0.2 < mismatch < 0.8
        assert (saved > 0.05) == shared


ALONE = [
    pytest.param("fsdp", "qwen3_moe", {}),
    pytest.param("fsdp", "gpt_oss", {"recompute": "full"}),
    pytest.param("fsdp", "deepseek_v3", {"recompute": "selective"}),
    pytest.param("mcore", "qwen3_moe", {"recompute": "full"}, marks=pytest.mark.slow),
    pytest.param("mcore", "deepseek_v3", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", "qwen3_moe", {"compile": True}, marks=pytest.mark.slow),
    pytest.param("fsdp", "qwen3_moe", {"compile": True, "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param("fsdp", "deepseek_v3", {"compile": True, "recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param("fsdp", "qwen3_next", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", "glm4_moe", {}, marks=pytest.mark.slow),
    pytest.param("mcore", "gpt_oss", {}, marks=pytest.mark.slow),
    pytest.param("mcore", "glm4_moe", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("backend", "family", "settings"), ALONE)
@pytest.mark.usefixtures("process_group")
def test_replayed_steps_equal_plain_transformers_on_the_same_routes(
    tmp_path: Path, backend: str, family: str, settings: dict[str, Any]
) -> None:
    folder = save_tiny_model(tmp_path, family)
    check(run(str(folder), {"backend": backend, **settings}), reference(folder))


LAYOUTS = [
    pytest.param("fsdp", 2, {"dp_shard": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, {"cp": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", 2, {"ep": 2}, marks=pytest.mark.slow),
    pytest.param("fsdp", 4, {"cp": 2, "ep": 4}, marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"pp": 2}, marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"tp": 2, "tp_sequence": True}, marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"cp": 2}, marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"ep": 2}, marks=pytest.mark.slow),
    pytest.param("mcore", 4, {"tp": 2, "tp_sequence": True, "cp": 2}, marks=pytest.mark.slow),
    pytest.param("mcore", 4, {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
    pytest.param("mcore", 2, {"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
]


def rank_layout(folder: str, backend: str, parallel: dict[str, Any]) -> tuple[Results, Tensor]:
    recompute = "full" if parallel.get("pp") else "none"
    settings = {"backend": backend, "parallel": ParallelConfig(**parallel), "recompute": recompute}
    # So small that a pipeline has several micro-batches under way, of which each has routes of its own.
    settings["micro_batch"] = MicroBatchConfig(max_tokens=64)
    return run(folder, settings), recorded(folder, settings)[0]


def recorded(folder: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The routes of a batch, of which each rank has all documents, and log-probabilities."""
    engine = build(folder, **settings)
    found = engine.infer_batch(from_lists(documents_of(0)), OutputRequest(log_probs=True, routed_experts=True))
    engine.close()
    return found["routed_experts"], found["log_probs"]


@pytest.mark.parametrize(("backend", "nproc", "parallel"), LAYOUTS)
def test_layouts_equal_plain_transformers_on_the_same_routes(
    tmp_path: Path, backend: str, nproc: int, parallel: dict[str, Any]
) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=4)
    found = run_ranks(rank_layout, nproc, str(folder), backend, parallel)
    expected = reference(folder)
    ((_, alone),) = run_ranks(rank_layout, 1, str(folder), backend, {})
    for results, routes in found:
        check(results, expected)
        assert torch.equal(routes, alone)
    assert alone.min() >= 0


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_recorded_routes_are_those_of_plain_transformers_and_change_nothing_when_they_are_replayed(
    tmp_path: Path, backend: str
) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe")
    plain, documents = RoutedReference(folder, OPTIM), documents_of(0)
    own: list[list[Tensor]] = [[] for _ in range(plain.count)]
    for layer, router in enumerate(m for m in plain.model.modules() if "router" in type(m).__name__.lower()):
        router.register_forward_hook(lambda module, args, out, layer=layer: own[layer].append(out[2]))
    for document in documents:
        plain.logits(document)
    routes, _ = recorded(str(folder), {"backend": backend, "share_prefixes": "on"})
    assert torch.equal(routes, torch.stack([torch.cat(parts) for parts in own], 1).int())

    def step(engine: BaseEngine, *, replay: bool) -> tuple[float, float | None]:
        batch = with_routes(documents, [routes]) if replay else from_lists(documents)
        result = engine.train_batch(batch, SFTLoss())
        assert result.metrics.get("routing_mismatch") == (0.0 if replay else None)
        assert engine.train_batch(from_lists(documents), SFTLoss()).metrics.get("routing_mismatch") is None
        engine.close()
        return result.loss, result.grad_norm

    free, replayed = (step(build(folder, backend=backend), replay=replay) for replay in (False, True))
    assert replayed == free


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_routes_may_have_any_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    engine, documents = build(save_tiny_model(tmp_path, "qwen3_moe")), documents_of(0)
    routes = [routes_of(d, 2, EXPERTS, 2, free=0) for d in documents]
    results = []
    for one in (torch.int16, dtype):
        batch = with_routes(documents, [r.to(one) for r in routes])
        results.append(engine.forward_backward(batch, SFTLoss(), forward_only=True).loss)
    assert results[0] == results[1]
    # None of them, and none at all.
    assert engine.infer_batch(from_lists([]), OutputRequest(routed_experts=True))["routed_experts"].shape == (0, 2, 2)
    engine.close()


@pytest.mark.usefixtures("process_group")
def test_controls_are_told_apart(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe")
    right = run(str(folder), {})
    for spoil in ("layers", "none"):
        assert abs(run(str(folder), {}, spoil)[0][0] - right[0][0]) > 1e-4 * right[0][0]


def test_tokens_without_a_route_follow_their_router() -> None:
    own = torch.tensor([[0, 1], [2, 3], [1, 0]])
    routes = ExpertRoutes(2, torch.tensor([[[1, 0], [0, 1]], [[-1, -1], [2, 3]], [[3, 1], [0, 1]]], dtype=torch.int8))
    assert routes.choose(own, 0).tolist() == [[1, 0], [2, 3], [3, 1]]
    differing = routes.differing()
    assert differing is not None
    # The other layer is another stage's.
    assert [int(x) for x in differing] == [1, 4]
    routes.choose(own, 0)
    assert [int(x) for x in routes.differing() or ()] == [1, 4], "a layer that is recomputed counts twice"
    assert routes.chosen([0]).tolist() == [[[1, 0], [-1, -1]], [[2, 3], [-1, -1]], [[3, 1], [-1, -1]]]
    assert ExpertRoutes(1).differing() is None


def routed(routes: Any) -> Any:
    return from_lists([[3, 4, 5]]).with_fields(routed_experts=torch.as_tensor(routes))


ROUTERS = RouterShape(layers=1, per_token=2, experts=4)
RIGHT = [[[0, 1]], [[3, 2]], [[-1, -1]]]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[0, 1]], [[3, 4]], [[-1, -1]]], "holds 4; experts are numbered from 0 to 3"),
        ([[[0, 1]], [[3, 2]], [[-2, -2]]], "holds -2"),
        ([[[0, 1]], [[3, 2]], [[-1, 2]]], r"of token 2 in layer 0 is \[-1, 2\]"),
        ([[[0, 1]], [[3, 3]], [[1, 2]]], r"of token 1 in layer 0 is \[3, 3\]"),
        ([[[0]], [[3]], [[1]]], r"is \[3, 1, 1\] torch.int64; this model's is \[3, 1, 2\]"),
        ([[[0.0, 1.0]]] * 3, "torch.float32; this model's"),
    ],
)
def test_wrong_routes_are_refused(routes: Any, message: str) -> None:
    check_routes(routed(RIGHT), ROUTERS)
    with pytest.raises(BatchError, match=message):
        check_routes(routed(routes), ROUTERS)


@pytest.mark.usefixtures("process_group")
def test_dense_models_have_no_routes(tmp_path: Path) -> None:
    engine = build(save_tiny_model(tmp_path, "qwen3"))
    with pytest.raises(BatchError, match="no experts whose routers could replay"):
        engine.train_batch(routed(RIGHT), SFTLoss())
    with pytest.raises(ConfigError, match="no experts whose routers can record"):
        engine.infer_batch(from_lists([[3, 4, 5]]), OutputRequest(routed_experts=True))
    engine.close()


def test_numbers_of_tokens_tell_routes_apart() -> None:
    rows = [list(pair) for pair in itertools.permutations(range(4), 2)]
    batch = from_lists([[7] * len(rows)]).with_fields(routed_experts=torch.tensor(rows)[:, None])
    numbers = route_numbers(batch, batch.input_ids).tolist()
    assert len(set(numbers)) == len(rows)
    assert numbers == route_numbers(batch, batch.input_ids).tolist()
    assert numbers != route_numbers(batch, batch.input_ids + 1).tolist()


@pytest.mark.usefixtures("process_group")
def test_routes_are_those_of_the_policy_alone(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3_moe")
    shared: dict[str, Any] = {"model": ModelConfig(path=str(folder)), "engine": EngineConfig(share_prefixes="off")}
    documents = documents_of(0)
    free = from_lists(documents)
    routed_batch = with_routes(documents, routes_for(documents, 2))
    reference_role = ReferenceWorker(ReferenceWorkerConfig(**shared)).initialize()
    found = [reference_role.compute_log_probs(batch)["reference_log_probs"] for batch in (free, routed_batch)]
    assert torch.equal(*found)
    reference_role.close()
    actor = ActorWorker(ActorConfig(**shared, optim=OPTIM)).initialize()
    own = actor.compute_log_probs(free, routed_experts=True)
    forced = actor.compute_log_probs(routed_batch, routed_experts=True)
    assert torch.equal(own["log_probs"], found[0])
    assert not torch.allclose(forced["log_probs"], own["log_probs"], atol=1e-4)
    given = routed_batch.token_fields["routed_experts"]
    assert torch.equal(forced["routed_experts"], torch.where(given < 0, forced["routed_experts"], given.int()))
    with pytest.raises(ConfigError, match="pass a PackedBatch"):
        actor.compute_log_probs({"input_ids": torch.ones(1, 2)}, routed_experts=True)
    actor.close()


class Experts(nn.Module):
    _is_expert_parallel = False


class Layer(nn.Module):
    """A layer that chooses experts itself, as some families do, among the scores of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = Experts(), nn.Linear(8, EXPERTS, bias=False)
        self.register_buffer("choice_bias", torch.zeros(EXPERTS))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(hidden).softmax(-1)
        groups = scores.view(-1, 2, 2).topk(2, -1)[0].sum(-1)
        assert groups.topk(2, -1)[1].shape == (len(hidden), 2)
        weights, chosen = torch.topk(scores, k=2, dim=-1)
        return weights, chosen


def test_layers_that_choose_experts_themselves_follow_routes() -> None:
    model = nn.Sequential(Layer(), Layer())
    config = Qwen3MoeConfig(num_experts=EXPERTS, num_experts_per_tok=2)
    assert record_routers(model, config) == RouterShape(layers=2, per_token=2, experts=EXPERTS, biased=True)
    assert [len(bias) for bias in router_biases(model).values()] == [EXPERTS, EXPERTS]
    given = torch.tensor([[[3, 1], [0, 2]], [[-1, -1], [1, 0]]])
    context = PackedContext(bounds=(0, 2), cu_seqlens=torch.tensor([0, 2]), routes=ExpertRoutes(2, given))
    hidden = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    free = [layer(hidden) for layer in model]
    follow(model, context.handle)
    for number, layer in enumerate(model):
        weights, chosen = layer(hidden)
        expected = torch.where(given[:, number] < 0, free[number][1], given[:, number])
        assert torch.equal(chosen, expected)
        assert isinstance(layer, Layer)
        assert torch.equal(weights, layer.gate(hidden).softmax(-1).gather(1, expected))
    follow(model, None)
    assert torch.equal(model[0](hidden)[1], free[0][1])


def test_routers_that_do_not_ask_are_named() -> None:
    routes = ExpertRoutes(2)
    routes.choose(torch.tensor([[0, 1]]), 0)
    with pytest.raises(ModelError, match=r"layers with experts \[1\] do not choose by torch.topk"):
        routes.check(range(2))


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_routes_make_no_graph_of_each_layer(tmp_path: Path) -> None:
    graphs = []
    for layers in (2, 6):
        folder = save_tiny_model(tmp_path / str(layers), "qwen3_moe", num_hidden_layers=layers)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run(str(folder), {"compile": True})
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
