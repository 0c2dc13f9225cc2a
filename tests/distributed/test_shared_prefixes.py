"""Steps in which each common prefix is computed once equal plain Hugging Face, one whole document at a time."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.engine import step_plan
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import (
    EngineConfig,
    LoraConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SharePrefixes,
)
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.loss import LossSums, OutputRequest, StepResult, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.packing.prefixes import Prefixes
from drivetrain.engine.packing.sharing import SharedLayout, shared_layout
from drivetrain.engine.rank_slice import RankSlice
from drivetrain.engine.registry import engine_class
from drivetrain.engine.step_plan import MicroBatch
from drivetrain.losses.sft import SFTLoss
from helpers.harness import run_ranks

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


def families(seed: int) -> list[list[int]]:
    """Prompts with three answers each, an answer that is the beginning of another one, equal answers, and documents of their own."""
    prompts, answers = tiny_documents(4, seed=seed, longest=24)[1:], tiny_documents(12, seed=100 + seed, longest=16)
    documents = [prompts[i % 3] + answers[i] for i in range(9)]
    documents += [documents[4][:-1], documents[3], answers[10], answers[11]]
    return [document[:40] for document in documents]


def build(folder: Path | str, backend: str, parallel: ParallelConfig, **settings: Any) -> BaseEngine:
    lora, head = settings.pop("lora", LoraConfig()), settings.pop("head", "lm")
    config = EngineConfig(
        backend=backend,
        parallel=parallel,
        micro_batch=MicroBatchConfig(max_tokens=settings.pop("max_tokens", 160)),
        share_prefixes=settings.pop("share", "on"),
        **settings,
    )
    model = ModelConfig(path=str(folder), lora=lora, head=head)
    return engine_class(backend)(model=model, engine=config, optim=OPTIM).initialize()


def compare(folder: Path, backend: str, parallel: ParallelConfig, steps: int = 2, **settings: Any) -> list[tuple[float, ...]]:
    """Relative differences (loss, gradient norm) to the reference, and the share of tokens that was not computed, per step."""
    engine = build(folder, backend, parallel, **settings)
    reference = PlainReference(folder, OPTIM)
    off: list[tuple[float, ...]] = []
    rank, size = engine.topology.dp_rank, engine.topology.dp_size
    for step in range(steps):
        documents = families(step)
        # Among others the answers' first tokens, which all of them learn from the prompt's last one.
        masks = [[i % 5 > 0 for i in range(len(d))] for d in documents]
        # Answers to one prompt stay together.
        groups = [i % 3 for i in range(9)] + [1, 0, 3, 4]
        mine = balance([len(d) for d in documents], size, groups=groups)[rank]
        batch = from_lists([documents[i] for i in mine], supervised=[masks[i] for i in mine])
        got = engine.train_batch(batch, SFTLoss())
        want = reference.step(documents, masks)
        assert got.grad_norm is not None
        off.append(
            (
                abs(got.loss - want.loss) / want.loss,
                abs(got.grad_norm - want.grad_norm) / want.grad_norm,
                got.shared_tokens / got.tokens,
            )
        )
    engine.close()
    return off


def check(off: list[tuple[float, ...]]) -> None:
    for loss_off, norm_off, saved in off:
        assert loss_off <= 1e-6
        assert norm_off <= 1e-5
        assert saved > 0.1


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        ("fsdp", "qwen3"),
        # Windows and soft caps; sinks; latent attention; a mixture of experts; learned positions.
        ("fsdp", "gemma2"),
        ("fsdp", "gpt_oss"),
        ("mcore", "qwen3"),
        *(
            pytest.param("fsdp", family, marks=pytest.mark.slow)
            for family in ("mistral", "gemma3_text", "deepseek_v3", "qwen3_moe", "gpt2", "llama")
        ),
        *(
            pytest.param("mcore", family, marks=pytest.mark.slow)
            for family in ("gemma2", "gemma3_text", "deepseek_v3", "qwen3_moe", "llama")
        ),
    ],
)
def test_a_family_equals_document_by_document(backend: str, family: str, tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    check(compare(folder, backend, ParallelConfig()))
    # Families are cut where they exceed the budget.
    check(compare(folder, backend, ParallelConfig(), steps=1, max_tokens=48))


def rank_compare(
    root: str, backend: str, axes: dict[str, Any], family: str, settings: dict[str, Any]
) -> list[tuple[float, ...]]:
    folder = Path(root) / "model"
    if dist.get_rank() == 0:
        more: dict[str, Any] = {"num_hidden_layers": 4} if axes.get("vpp") else {}
        save_tiny_model(folder, family, **more)
    dist.barrier()
    return compare(folder, backend, ParallelConfig(**axes), steps=5, **settings)


LAYOUTS = [
    ("fsdp", 2, {"cp": 2}, "qwen3", {}),
    ("fsdp", 2, {"dp_shard": 2}, "qwen3", {"recompute": "full"}),
    ("fsdp", 4, {"cp": 4}, "qwen3", {}),
    ("fsdp", 4, {"dp_replicate": 2, "dp_shard": 2}, "qwen3", {}),
    ("fsdp", 2, {"cp": 2}, "gpt_oss", {}),
    ("mcore", 2, {"tp": 2, "tp_sequence": True}, "qwen3", {}),
    ("mcore", 2, {"pp": 2}, "llama", {}),
    ("mcore", 2, {"pp": 2, "vpp": 2}, "llama", {}),
    ("mcore", 2, {"cp": 2}, "gemma2", {"recompute": "selective"}),
    ("mcore", 2, {"ep": 2}, "qwen3_moe", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "nproc", "axes", "family", "settings"), LAYOUTS)
def test_layouts_equal_document_by_document(
    backend: str, nproc: int, axes: dict[str, Any], family: str, settings: dict[str, Any]
) -> None:
    root = tempfile.mkdtemp()
    try:
        for off in run_ranks(rank_compare, nproc, root, backend, axes, family, settings, timeout_s=240):
            check(off)
    finally:
        shutil.rmtree(root)


def test_outputs_are_those_of_whole_documents(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    reference = PlainReference(folder, OPTIM)
    documents = families(7)
    batch = from_lists(documents)
    shared, alone = (build(folder, "fsdp", ParallelConfig(), share=share) for share in ("on", "off"))
    want = torch.cat([torch.cat([reference.log_probs(d), torch.zeros(1)]) for d in documents]).detach()
    for tokens in (None, torch.arange(batch.num_tokens) % 5 == 1):
        request = OutputRequest(log_probs=True, entropy=True)
        got, plain = (engine.infer_batch(batch, request, tokens=tokens) for engine in (shared, alone))
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(got[name], plain[name], rtol=1e-5, atol=1e-5)
        chosen = torch.ones(batch.num_tokens, dtype=torch.bool) if tokens is None else tokens
        torch.testing.assert_close(got["log_probs"], torch.where(chosen, want, 0.0), rtol=1e-5, atol=2e-5)
    for engine in (shared, alone):
        engine.close()


@dataclass(frozen=True)
class SquaredValues:
    """Half the squared distance of the value of every token, also of prompts, to a number that depends on the document."""

    request: OutputRequest = OutputRequest(values=True)
    linear: bool = False

    def tokens(self, batch: PackedBatch) -> torch.Tensor:
        return torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.input_ids.device)

    def weights(self, batch: PackedBatch) -> dict[str, float]:
        return {"value": float(batch.num_tokens)}

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        assert outputs.values is not None
        lengths = torch.tensor(batch.lengths, device=batch.input_ids.device)
        targets = torch.repeat_interleave(lengths / 10, lengths)
        return LossSums(terms={"value": 0.5 * ((outputs.values - targets) ** 2).sum()}, metrics={})


def rank_same_as_alone(folder: str, backend: str, axes: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """The largest relative differences of losses and gradient norms over five steps to an engine that shares nothing."""
    parallel = ParallelConfig(**axes)
    results: dict[SharePrefixes, list[StepResult]] = {}
    shares: tuple[SharePrefixes, ...] = ("on", "off")
    for share in shares:
        engine = build(folder, backend, parallel, share=share, **settings)
        loss = SquaredValues() if settings.get("head") == "value" else SFTLoss()
        results[share] = []
        for step in range(5):
            documents = families(step)
            rank, size = engine.topology.dp_rank, engine.topology.dp_size
            mine = balance([len(d) for d in documents], size)[rank]
            results[share].append(engine.train_batch(from_lists([documents[i] for i in mine]), loss))
        engine.close()
    assert all(got.shared_tokens > 0 for got in results["on"])
    pairs = list(zip(results["on"], results["off"], strict=True))
    assert len({got.grad_norm for got, _ in pairs}) == 5
    return [
        max(abs(got.loss - want.loss) / want.loss for got, want in pairs),
        max(abs(got.grad_norm - want.grad_norm) / want.grad_norm for got, want in pairs),  # type: ignore[operator]
    ]


@pytest.mark.parametrize(
    ("backend", "axes", "settings"),
    [
        ("fsdp", {}, {"lora": LoraConfig(rank=4)}),
        ("fsdp", {}, {"head": "value"}),
        pytest.param("fsdp", {"cp": 2}, {"lora": LoraConfig(rank=4), "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("fsdp", {"dp_shard": 2}, {"head": "value"}, marks=pytest.mark.slow),
        pytest.param("mcore", {"tp": 2}, {"lora": LoraConfig(rank=4)}, marks=pytest.mark.slow),
        pytest.param("mcore", {"pp": 2}, {"head": "value"}, marks=pytest.mark.slow),
    ],
)
def test_adapters_and_values_are_those_of_whole_documents(
    tmp_path: Path, backend: str, axes: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    nproc = 2 if axes else 1
    for loss_off, norm_off in run_ranks(rank_same_as_alone, nproc, str(folder), backend, axes, settings, timeout_s=240):
        assert loss_off <= 1e-6
        assert norm_off <= 1e-5


def test_without_its_adapters_a_model_shares_too(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    reference, documents = PlainReference(folder, OPTIM), families(3)
    batch = from_lists(documents)
    engine = build(folder, "fsdp", ParallelConfig(), lora=LoraConfig(rank=4), max_tokens=1024)
    for _ in range(2):
        assert engine.train_batch(batch, SFTLoss()).shared_tokens > 0
    want = torch.cat([torch.cat([reference.log_probs(d), torch.zeros(1)]) for d in documents]).detach()
    request = OutputRequest(log_probs=True)
    with engine.disable_adapter():
        torch.testing.assert_close(engine.infer_batch(batch, request)["log_probs"], want, rtol=1e-5, atol=2e-5)
    assert float((engine.infer_batch(batch, request)["log_probs"] - want).abs().max()) > 1e-4
    engine.close()


def test_auto_shares_where_it_pays(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    engine = build(folder, "fsdp", ParallelConfig(), share="auto")
    much, little = families(0), [[1, 2, 3, 4, *range(10, 40)], [1, 2, 3, 5, *range(50, 90)]]
    assert engine.forward_backward(from_lists(much), SFTLoss(), forward_only=True).shared_tokens > 0
    assert engine.forward_backward(from_lists(little), SFTLoss(), forward_only=True).shared_tokens == 0
    engine.close()


def test_a_model_whose_positions_depend_on_the_length_shares_nothing(tmp_path: Path, process_group: None) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = save_tiny_model(tmp_path / "model", "llama", rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"engine\.share_prefixes=on .*rope_type=dynamic"):
        build(folder, "mcore", ParallelConfig())
    engine = build(folder, "mcore", ParallelConfig(), share="auto")
    assert engine.forward_backward(from_lists(families(0)), SFTLoss(), forward_only=True).shared_tokens == 0
    engine.close()


def shifted(layout: SharedLayout) -> SharedLayout:
    """The negative control: the parent's last token counts for the children's first one."""
    first = torch.tensor([layout.bounds[s] for s, parent in enumerate(layout.parents) if parent >= 0])
    index = layout.index.clone()
    index[first] -= 1
    return replace(layout, index=index)


def siblings(layout: SharedLayout) -> SharedLayout:
    """The negative control: a child sees its sibling instead of its parent."""
    parents = [s - 1 if parent >= 0 else -1 for s, parent in enumerate(layout.parents)]
    return replace(layout, parents=tuple(parents))


def test_a_last_token_in_the_parent_is_noticed(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: parents have the whole prefix, so that one label of their last token counts for all children."""

    def wrong(lengths: Sequence[int], prefixes: Prefixes) -> SharedLayout | None:
        # Where every child has a token of its own left.
        room = [
            min([n for n, f in zip(lengths, prefixes.families, strict=True) if f == i] or [0])
            for i in range(len(prefixes.parents))
        ]
        longer = tuple(p + 1 if least > p + 1 else p for p, least in zip(prefixes.parents, room, strict=True))
        assert longer != prefixes.parents
        return shared_layout(lengths, replace(prefixes, parents=longer))

    monkeypatch.setattr(step_plan, "shared_layout", wrong)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    ((loss_off, _, _),) = compare(folder, "fsdp", ParallelConfig(), steps=1, max_tokens=1024)
    assert loss_off > 1e-4


def test_a_wrong_position_is_noticed(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the positions of all parents are off by one."""
    right = RankSlice.from_micro_batch

    def wrong(micro_batch: MicroBatch, *args: Any, **options: Any) -> RankSlice:
        part, layout = right(micro_batch, *args, **options), micro_batch.layout
        if layout is None:
            return part
        positions = part.position_ids.clone()
        for parent in set(layout.parents) - {-1}:
            positions[layout.bounds[parent] : layout.bounds[parent + 1]] += 1
        return replace(part, position_ids=positions)

    monkeypatch.setattr(RankSlice, "from_micro_batch", wrong)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(AssertionError):
        check(compare(folder, "fsdp", ParallelConfig(), steps=1))


@pytest.mark.parametrize("defect", [shifted, siblings])
def test_a_wrong_layout_is_noticed(tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch, defect: Any) -> None:
    def wrong(*args: Any) -> SharedLayout | None:
        layout = shared_layout(*args)
        return None if layout is None else defect(layout)

    monkeypatch.setattr(step_plan, "shared_layout", wrong)
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(AssertionError):
        check(compare(folder, "fsdp", ParallelConfig(), steps=1))
