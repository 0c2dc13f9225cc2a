"""Heads of other types than the language-model head, against plain torch."""

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drivetrain.engine.config import EngineConfig, LoraConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import BatchError, ConfigError, ModelError
from drivetrain.engine.export import export_hf
from drivetrain.engine.heads import HeadType, head_of
from drivetrain.engine.loss import LossSums, OutputRequest, TokenOutputs
from drivetrain.engine.model_types import register_head, unregister_head
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.losses.actions import ActionLoss
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)
SHAPE = (4, 3)


def demonstrations(step: int) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    """Documents, and for each token a chunk and which of its actions there are."""
    documents = tiny_documents(6, seed=step, longest=24)
    g = torch.Generator().manual_seed(step)
    actions = [torch.randn(len(d), *SHAPE, generator=g) for d in documents]
    masks = [torch.rand(len(d), 1, generator=g) < 0.5 for d in documents]
    # The last chunks of a demonstration are shorter.
    masks = [(mask & (torch.arange(SHAPE[0]) < len(mask) - torch.arange(len(mask))[:, None])) for mask in masks]
    return documents, actions, masks


def pack(step: int, chosen: Sequence[int] | None = None) -> PackedBatch:
    documents, actions, masks = demonstrations(step)
    rows = range(len(documents)) if chosen is None else chosen
    actions = [torch.where(m[..., None], a, float("nan")) for a, m in zip(actions, masks, strict=True)]
    batch = from_lists([documents[i] for i in rows])
    return batch.with_fields(actions=torch.cat([actions[i] for i in rows]), action_mask=torch.cat([masks[i] for i in rows]))


class Plain(PlainReference):
    """Plain transformers with a linear layer behind the decoder, a document at a time."""

    def __init__(self, folder: Path, weight: Tensor, bias: Tensor) -> None:
        super().__init__(folder, OPTIM)
        head = nn.Linear(weight.shape[1], len(weight))
        head.weight, head.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
        self.model.lm_head = head
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": OPTIM.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in self.model.named_parameters():
            groups[parameter.dim() < 2 or name.endswith("bias")]["params"].append(parameter)
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)

    def chunks(self, document: Sequence[int]) -> Tensor:
        return self.logits(document).unflatten(-1, SHAPE)

    def train(self, step: int, norm: str = "l1") -> tuple[float, float]:
        documents, actions, masks = demonstrations(step)
        total = sum(int(mask.sum()) for mask in masks) * SHAPE[1]
        loss = 0.0
        for document, action, mask in zip(documents, actions, masks, strict=True):
            difference = (self.chunks(document) - action)[mask]
            one = (difference.abs() if norm == "l1" else difference.square()).sum() / total
            if mask.any():
                one.backward()
            loss += float(one.detach())
        norm_of_all = float(
            torch.stack([p.grad.double().norm() for p in self.model.parameters() if p.grad is not None]).norm()
        )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.clip_grad_norm or 1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm_of_all


def built(folder: Path | str, backend: str, parallel: ParallelConfig | None = None, **model: Any) -> Any:
    config = EngineConfig(
        backend=backend, parallel=parallel or ParallelConfig(), micro_batch=MicroBatchConfig(max_tokens=48), seed=3
    )
    settings = ModelConfig(path=str(folder), **{"head": "actions", "head_shape": SHAPE, **model})
    return engine_class(backend)(model=settings, engine=config, optim=OPTIM).initialize()


def compare(folder: Path, backend: str, parallel: ParallelConfig) -> list[tuple[float, float]]:
    """Relative differences (loss, gradient norm) of five steps, and of the outputs behind them."""
    engine = built(folder, backend, parallel)
    with engine.named_weights() as stream:
        weights = {name: value.clone() for name, value in stream}
    plain, off = Plain(folder, weights["score.weight"], weights["score.bias"]), []
    assert weights["score.weight"].std() > 0
    for step in range(5):
        size, rank = engine.topology.dp_size, engine.topology.dp_rank
        got = engine.train_batch(pack(step, range(rank, 6, size)), ActionLoss())
        loss, norm = plain.train(step)
        off.append((abs(got.loss / loss - 1), abs(got.grad_norm / norm - 1)))
        assert got.metrics["action_error"] == pytest.approx(loss, rel=1e-5)
    documents = demonstrations(9)[0]
    chunks = engine.infer_batch(pack(9), OutputRequest(others=("actions",)))["actions"]
    expected = torch.cat([plain.chunks(document) for document in documents]).detach()
    assert chunks.shape == expected.shape
    off.append((float((chunks - expected).abs().max()), 0.0))
    engine.close()
    return off


def check(off: Sequence[tuple[float, float]]) -> None:
    *steps, (outputs, _) = off
    assert all(loss <= 1e-6 and norm <= 1e-5 for loss, norm in steps), steps
    assert outputs <= 1e-4


@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_chunks_of_actions_equal_plain_torch(backend: str, tmp_path: Path, process_group: None) -> None:
    check(compare(save_tiny_model(tmp_path / "model", "qwen3"), backend, ParallelConfig()))


def rank_compare(folder: str, cases: Sequence[tuple[str, dict[str, Any]]]) -> list[list[tuple[float, float]]]:
    if dist.get_rank() == 0:
        save_tiny_model(Path(folder), "qwen3")
    dist.barrier()
    return [compare(Path(folder), backend, ParallelConfig(**axes)) for backend, axes in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [("fsdp", {"cp": 2}), ("fsdp", {})],
        pytest.param(
            [
                ("mcore", {"tp": 2}),
                ("mcore", {"tp": 2, "tp_sequence": True}),
                ("mcore", {"pp": 2}),
                ("mcore", {"cp": 2}),
                ("mcore", {}),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["fsdp", "mcore"],
)
def test_chunks_of_actions_on_two_ranks(cases: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    for off in run_ranks(rank_compare, 2, str(tmp_path / "model"), cases, timeout_s=240)[0]:
        check(off)


class Sum(HeadType):
    """A type of a third party: the hidden state weighted by a vector, and its square."""

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {"sums": (), "squares": (1,)}

    def module(self, hidden: int, dtype: torch.dtype) -> nn.Linear:
        return nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def compute(self, head: nn.Module, hidden_sh: Tensor) -> dict[str, Tensor]:
        sums = head(hidden_sh)
        return {"sums": sums[:, 0], "squares": sums.square()}


class SumLoss:
    """The mean of both outputs over all tokens."""

    request = OutputRequest(others=("sums", "squares"))
    linear = False

    def tokens(self, batch: PackedBatch) -> Tensor:
        return torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        return {"sum": float(batch.num_tokens)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        return LossSums(terms={"sum": outputs.others["sums"].sum() + outputs.others["squares"].sum()})


@pytest.fixture
def sum_type() -> Iterator[None]:
    register_head("sum", f"{__name__}:Sum")
    yield
    unregister_head("sum")


@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_a_type_of_a_third_party(backend: str, tmp_path: Path, process_group: None, sum_type: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    engine = built(folder, backend, head="sum", head_shape=())
    with engine.named_weights() as stream:
        (weight,) = (value.clone() for name, value in stream if name.startswith("score."))
    documents = tiny_documents(5, seed=1, longest=40)
    got = engine.train_batch(from_lists(documents), SumLoss())
    with pytest.raises(
        ConfigError, match=r"log_probs requested from a model with model.head=sum, which returns sums, squares"
    ):
        engine.infer_batch(from_lists(documents), OutputRequest(log_probs=True))
    engine.close()
    plain = PlainReference(folder, OPTIM)
    plain.model.lm_head = nn.Linear(weight.shape[1], 1, bias=False)
    plain.model.lm_head.weight = nn.Parameter(weight)
    count, loss = sum(map(len, documents)), 0.0
    for document in documents:
        sums = plain.logits(document)
        one = (sums.sum() + sums.square().sum()) / count
        one.backward()
        loss += float(one.detach())
    norm = torch.stack([p.grad.double().norm() for p in plain.model.parameters() if p.grad is not None]).norm()
    assert got.loss == pytest.approx(loss, rel=1e-6)
    assert got.grad_norm == pytest.approx(float(norm), rel=1e-5)
    with pytest.raises(ConfigError, match=r"model.head=sum is already taken"):
        register_head("sum", "elsewhere:Sum")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head": "action"}, "model.head=action; it must be one of actions, lm, value"),
        ({"head_shape": ()}, r"model.head_shape=\[\] with model.head=actions; give two numbers"),
        ({"head_shape": (4,)}, r"model.head_shape=\[4\] with model.head=actions; give two numbers"),
        ({"head_shape": (4, 0)}, r"model.head_shape=\[4, 0\]; every number must be at least 1"),
        ({"head": "value"}, r"model.head_shape=\[4, 3\] with model.head=value, which gives one number per token; unset it"),
        ({"head": "lm"}, r"model.head_shape=\[4, 3\] with model.head=lm, whose outputs have no shape; unset it"),
    ],
)
def test_settings_that_do_not_fit_the_type(model: dict[str, Any], message: str, tmp_path: Path, process_group: None) -> None:
    save_tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(ConfigError, match=message):
        built(tmp_path / "model", "fsdp", **model)


def test_demonstrations_that_cannot_be_learned_from(tmp_path: Path, process_group: None) -> None:
    engine = built(save_tiny_model(tmp_path / "model", "qwen3"), "fsdp")
    good = pack(0)
    actions, mask = good.token_fields["actions"], good.token_fields["action_mask"]
    start = good.bounds[1]
    nan = torch.where(mask[..., None], actions, 0.0)
    nan[start + 2] = float("nan")
    every = torch.ones_like(mask)
    for fields, message in (
        ({"actions": actions[:, :, 0]}, r"token field 'actions' is \[\d+, 4\]; it must be \[\d+, 4, numbers of an action\]"),
        ({"actions": actions[:, :2]}, r"token field 'actions' is \[\d+, 2, 3\]; it must be"),
        ({"action_mask": mask[:, 0]}, r"token field 'action_mask' is \[\d+\]; it must be \[\d+, actions of a chunk\]"),
        ({"actions": nan, "action_mask": every}, "actions of token 2 in sequence 1 are not finite"),
        ({"actions": torch.zeros(len(mask), 4, 2)}, r"the batch has chunks of \[4, 2\], but the model's are \[4, 3\]"),
        ({"action_mask": torch.zeros_like(mask)}, "weight"),
    ):
        with pytest.raises(BatchError, match=message):
            engine.train_batch(good.with_fields(**fields), ActionLoss())
    with pytest.raises(BatchError, match="token field 'action_mask' is missing"):
        engine.train_batch(from_lists([[5, 6]]), ActionLoss())
    with pytest.raises(ConfigError, match="norm='l3'; it must be l1 or l2"):
        ActionLoss(norm="l3")  # type: ignore[arg-type]
    loss, norm = engine.train_batch(good, ActionLoss(norm="l2")).loss, 0.0
    with engine.named_weights() as stream:
        assert all(bool(torch.isfinite(value).all()) for _, value in stream)
    assert loss > norm
    engine.close()


def test_a_policy_is_exported_loaded_and_moved_to_the_other_engine(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    engine = built(folder, "fsdp")
    for step in range(2):
        engine.train_batch(pack(step), ActionLoss())
    export_hf(engine, tmp_path / "hf")
    engine.save_checkpoint(tmp_path / "checkpoints", 2)
    request = OutputRequest(others=("actions",))
    chunks = engine.infer_batch(pack(5), request)["actions"]
    after = engine.train_batch(pack(2), ActionLoss())
    engine.close()
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.get_slice("score.weight").get_shape() == [12, 64]
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert '"head_type"' in (tmp_path / "hf" / "config.json").read_text()
    assert not (tmp_path / "hf" / "generation_config.json").exists()
    for backend in ("fsdp", "mcore"):
        loaded = built(tmp_path / "hf", backend)
        torch.testing.assert_close(loaded.infer_batch(pack(5), request)["actions"], chunks, rtol=1e-5, atol=1e-5)
        loaded.close()
    moved = built(folder, "mcore")
    moved.load_checkpoint(next((tmp_path / "checkpoints").glob("step-*")))
    result = moved.train_batch(pack(2), ActionLoss())
    assert result.loss == pytest.approx(after.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(after.grad_norm, rel=1e-5)
    moved.close()
    # Adapters on the decoder, and the head trained beside them.
    adapted = built(folder, "fsdp", lora=LoraConfig(rank=2))
    trained = [name for name, p in adapted._root.named_parameters() if p.requires_grad]
    assert {name for name in trained if ".lora_" not in name} == {"score.weight", "score.bias"}
    assert adapted.train_batch(pack(0), ActionLoss()).grad_norm > 0
    adapted.close()


class Gaussian(HeadType):
    """The mean and the spread of an action, by several modules, with a parameter and a buffer of its own."""

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {"mean": (2,), "spread": (2,)}

    def module(self, hidden: int, dtype: torch.dtype) -> nn.Module:
        head = nn.Module()
        head.inner = nn.Sequential(nn.Linear(hidden, 16, dtype=dtype), nn.Tanh())
        head.mean = nn.Linear(16, 2, dtype=dtype)
        head.queries = nn.Parameter(torch.randn(2, 16, dtype=dtype))
        head.log_std = nn.Parameter(torch.full((2,), -0.5, dtype=dtype))
        head.register_buffer("scale", torch.tensor([3.0, 5.0], dtype=dtype))
        return head

    def compute(self, head: Any, hidden_sh: Tensor) -> dict[str, Tensor]:
        inner = head.inner(hidden_sh)
        return {"mean": head.mean(inner) * head.scale, "spread": (inner @ head.queries.T + head.log_std).exp()}


class SquaresLoss(SumLoss):
    """The mean square of some outputs; in documents of less than three tokens, of the first one alone."""

    def __init__(self, *names: str) -> None:
        self.request = OutputRequest(others=names)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        first, *others = outputs.others.values()
        lengths = torch.tensor(batch.lengths)
        is_long = (lengths >= 3).repeat_interleave(lengths)
        # A micro-batch without a longer document does not use the others at all.
        used = [first.square().sum(), *(x[is_long].square().sum() for x in others if is_long.any())]
        return LossSums(terms={"sum": torch.stack(used).sum()})


def rank_gaussian(folder: str, backend: str, axes: dict[str, Any], saved: str = "") -> dict[str, Any]:
    """Steps with both outputs, and with one where the other ranks have more, and what the head began with."""
    register_head("gaussian", f"{__name__}:Gaussian")
    try:
        engine = built(folder, backend, ParallelConfig(**axes), head="gaussian", head_shape=())
        with engine.named_weights() as stream:
            weights = {n: value.clone() for n, value in stream if n.startswith("score.")}
        size, rank = engine.topology.dp_size, engine.topology.dp_rank
        documents = [[5, 6], *tiny_documents(6, seed=2, longest=40)[1:]]
        # The first rank has a document of two tokens, the others all the rest.
        part = documents if size == 1 else documents[:1] if rank == 0 else documents[1:]
        results = [engine.train_batch(from_lists(part), SquaresLoss(*names)) for names in (("mean", "spread"), ("mean",))]
        if saved:
            engine.save_checkpoint(Path(saved), 2)
            export_hf(engine, Path(saved) / "hf")
            results.append(engine.train_batch(from_lists(part), SquaresLoss("mean", "spread")))
        engine.close()
        return {"weights": weights, "steps": [(r.loss, r.grad_norm) for r in results]}
    finally:
        unregister_head("gaussian")


@pytest.mark.slow
def test_a_head_of_several_modules_on_every_layout(tmp_path: Path, process_group: None) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "qwen3"))
    alone = rank_gaussian(folder, "fsdp", {}, str(tmp_path / "saved"))
    first = alone["weights"]
    assert first["score.log_std"].tolist() == [-0.5, -0.5]
    assert first["score.scale"].tolist() == [3.0, 5.0]
    assert first["score.queries"].std() > 0.5
    assert 0 < first["score.mean.weight"].std() < 0.1
    others = [rank_gaussian(folder, "mcore", {})]
    for backend, axes in (("fsdp", {}), ("fsdp", {"cp": 2}), ("mcore", {"tp": 2, "tp_sequence": True}), ("mcore", {"pp": 2})):
        others += run_ranks(rank_gaussian, 2, folder, backend, axes)
    for other in others:
        for name, value in other["weights"].items():
            assert torch.equal(value, first[name]), name
        for (loss, norm), (want, of_norm) in zip(other["steps"], alone["steps"], strict=False):
            assert loss == pytest.approx(want, rel=2e-6)
            assert norm == pytest.approx(of_norm, rel=2e-5)
    # Resumed on the other engine, and loaded from an export, without one of its tensors too.
    register_head("gaussian", f"{__name__}:Gaussian")
    try:
        moved = built(folder, "mcore", head="gaussian", head_shape=())
        moved.load_checkpoint(next((tmp_path / "saved").glob("step-*")))
        documents = [[5, 6], *tiny_documents(6, seed=2, longest=40)[1:]]
        result = moved.train_batch(from_lists(documents), SquaresLoss("mean", "spread"))
        assert (result.loss, result.grad_norm) == pytest.approx(alone["steps"][2], rel=1e-5)
        moved.close()
        export = tmp_path / "saved" / "hf"
        built(export, "fsdp", head="gaussian", head_shape=()).close()
        with pytest.raises(
            ModelError, match=r"head_type=.*'gaussian'.*, but model.head=actions and model.head_shape=\[4, 3\]"
        ):
            built(export, "fsdp")
        file = export / "model.safetensors"
        tensors = load_file(file)
        del tensors["score.queries"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(
            ModelError, match=r"has a different head than model.head: it has score.inner.0.bias, .* instead of score.queries"
        ):
            built(export, "fsdp", head="gaussian", head_shape=())
    finally:
        unregister_head("gaussian")


class Bad(Sum):
    """What a head must not do, by the name that a test has given it."""

    fault = ""

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        return {"log_probs": ()} if self.fault == "name" else {"sums": ()}

    def module(self, hidden: int, dtype: torch.dtype) -> Any:
        head: Any = super().module(hidden, dtype)
        if self.fault in ("scalar", "cube"):
            head.extra = nn.Parameter(torch.ones(() if self.fault == "scalar" else (2, 2, 2)))
        return head

    def compute(self, head: nn.Module, hidden_sh: Tensor) -> Any:
        sums = head(hidden_sh)[:, 0]
        faulty = {"row": {"sums": sums[:1]}, "key": {"sum": sums}, "type": sums, "integers": {"sums": sums.long()}}
        return faulty.get(self.fault, {"sums": sums})


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("name", ConfigError, "Bad has an output 'log_probs', a name that the engine reserves"),
        ("scalar", ModelError, r"the parameter extra of Bad is \[\]; give it one axis or two"),
        ("cube", ModelError, r"the parameter extra of Bad is \[2, 2, 2\]"),
        ("row", ModelError, r"Bad.compute \(model.head=bad\) returned sums \[1\] of torch.float32; it must be \[5\]"),
        ("key", ModelError, r"returned \['sum'\]; it must return a dict with sums"),
        ("type", ModelError, "returned Tensor; it must return a dict with sums"),
        ("integers", ModelError, r"returned sums \[5\] of torch.int64; it must be \[5\] of floating point"),
    ],
)
def test_heads_with_faults(
    fault: str, error: type[Exception], message: str, tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_head("bad", f"{__name__}:Bad")
    monkeypatch.setattr(Bad, "fault", fault)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    try:
        with pytest.raises(error, match=message):
            built(folder, "fsdp", head="bad", head_shape=()).infer_batch(
                from_lists([[5, 6, 7], [8, 9]]), OutputRequest(others=("sums",))
            )
    finally:
        unregister_head("bad")


def test_registrations_that_cannot_be_used(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"path": str(tmp_path), "head": "mine"}
    for location, message in (
        ("nowhere.at_all:Head", "model.head=mine: nowhere.at_all:Head cannot be imported: No module named 'nowhere'"),
        (f"{__name__}:Missing", "model.head=mine: .*Missing cannot be imported"),
        (f"{__name__}:pack", "model.head=mine is registered as <function pack .* it must be a subclass of"),
        ("drivetrain.engine.heads:HeadType", "model.head=mine: HeadType cannot be created: Can't instantiate abstract class"),
    ):
        register_head("mine", location)
        try:
            with pytest.raises(ConfigError, match=message):
                head_of(ModelConfig(**settings))
        finally:
            unregister_head("mine")
    for wrong in ("module_alone", ":Head", "module:", Sum):
        with pytest.raises(ConfigError, match=r"is not a location; give 'module:attribute'"):
            register_head("mine", wrong)  # type: ignore[arg-type]
    for name in ("value", "never"):
        with pytest.raises(ConfigError, match=f"model.head={name} was not added by register_head"):
            unregister_head(name)
    with pytest.raises(ConfigError, match=r"OutputRequest\(others='actions'\); give a tuple"):
        OutputRequest(others="actions")  # type: ignore[arg-type]


PAGE = Path(__file__).parents[2] / "docs" / "add-a-model-type.md"


def test_the_programs_of_the_page(tmp_path: Path, process_group: None) -> None:
    """The policy, and the head and the loss of one's own, with a step of them."""
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    policy, own_type = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "policy"}
    exec(policy.replace("MODEL", str(folder)), names)
    assert names["chunks"].shape == (5, 4, 2)
    assert names["chunks"].abs().sum() > 0
    module = types.ModuleType("page_of_model_types")
    sys.modules[module.__name__] = module
    exec(own_type, module.__dict__)
    try:
        engine = built(folder, "fsdp", head="spectrum", head_shape=(8,))
        batch = from_lists([[5, 6, 7], [8, 9]]).with_fields(
            spectrum=torch.randn(5, 8), stop=torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0])
        )
        first = engine.train_batch(batch, module.SpectrumLoss()).loss
        outputs = engine.infer_batch(batch, OutputRequest(others=("spectrum", "stop")))
        assert {name: tuple(value.shape) for name, value in outputs.items()} == {"spectrum": (5, 8), "stop": (5,)}
        assert first > 0
        engine.close()
    finally:
        unregister_head("spectrum")
        del sys.modules[module.__name__]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "words"),
    [(1, ["--backend", "fsdp"]), (1, ["--backend", "mcore"]), (2, ["--backend", "mcore", "--parallel", "tp=2"]), (2, [])],
    ids=str,
)
def test_a_policy_learns_from_demonstrations(nproc: int, words: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc > 1 else []
    example = PAGE.parents[1] / "examples" / "action_chunks.py"
    done = subprocess.run(
        [sys.executable, *launcher, str(example), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == nproc
    assert all(one == results[0] and one["reached"] for one in results)
