"""A checkpoint of any layout goes on in any other, to the bit in what is stored, within rounding in what follows.

Compared with plain Hugging Face restarted from the same checkpoint: over a longer run one rounding grows, so a run that was
never interrupted would be no measure for another layout.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from drivetrain.checkpoint_tools import compare
from drivetrain.engine.config import ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.losses.sft import SFTLoss
from helpers.engines import build, close_to, share
from helpers.harness import run_ranks
from helpers.restarted import Restarted

Layout = tuple[str, int, dict[str, Any]]
"""Backend, processes, axes."""

DENSE: dict[str, list[Layout]] = {
    "fsdp": [
        ("fsdp", 1, {}),
        ("fsdp", 2, {}),
        ("fsdp", 4, {"dp_replicate": 2}),
        ("fsdp", 4, {"cp": 2}),
        ("fsdp", 4, {}),
    ],
    "mcore": [
        ("mcore", 1, {}),
        ("mcore", 2, {"tp": 2}),
        ("mcore", 4, {"pp": 2, "vpp": 2}),
        ("mcore", 4, {"tp": 2, "tp_sequence": True, "cp": 2}),
        ("mcore", 2, {}),
        ("mcore", 4, {"tp": 2, "pp": 2}),
    ],
}
SPARSE: dict[str, list[Layout]] = {
    "fsdp": [("fsdp", 1, {}), ("fsdp", 2, {"ep": 2}), ("fsdp", 4, {"ep": 2})],
    "mcore": [
        ("mcore", 1, {}),
        ("mcore", 2, {"ep": 2}),
        ("mcore", 4, {"ep": 2, "pp": 2}),
        ("mcore", 4, {"tp": 2, "tp_sequence": True, "ep": 2}),
    ],
}


def train(engine: Any, numbers: range) -> list[tuple[float, float]]:
    found = []
    for number in numbers:
        result = engine.train_batch(share(engine, tiny_documents(8, seed=number)), SFTLoss())
        found.append((result.loss, result.grad_norm))
    return found


def rank_saves(folder: str, root: str, layouts: list[Layout]) -> list[Any]:
    """Save in every layout after two steps, and go on for five."""
    import torch.distributed as dist

    found = []
    for i, (backend, nproc, axes) in enumerate(layouts):
        if dist.get_rank() < nproc:
            parallel = ParallelConfig(**axes)
            with contextlib.closing(build(folder, backend=backend, parallel=parallel, ranks=range(nproc))) as engine:
                train(engine, range(2))
                saved = engine.save_checkpoint(f"{root}/{i}", 2, {"cursor": 16})
                found.append((saved, train(engine, range(2, 7))))
        dist.barrier()
    return found


def rank_loads(folder: str, root: str, hops: list[tuple[str, Layout]]) -> list[Any]:
    """Load each checkpoint in a layout, save what was loaded, and go on for five steps."""
    import torch.distributed as dist

    found = []
    for i, (checkpoint, (backend, nproc, axes)) in enumerate(hops):
        if dist.get_rank() < nproc:
            parallel = ParallelConfig(**axes)
            with contextlib.closing(build(folder, backend=backend, parallel=parallel, ranks=range(nproc))) as engine:
                train(engine, range(1))  # what loading must replace
                restored = engine.load_checkpoint(checkpoint)
                assert restored.extra == {"cursor": 16}
                again = engine.save_checkpoint(f"{root}/again{i}", 2)
                found.append((again, restored.same_layout, train(engine, range(2, 7))))
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_any_layout_to_any_other(family: str, backend: str, tmp_path: Path) -> None:
    tied = family == "qwen3"
    folder = str(save_tiny_model(tmp_path / "model", family, num_hidden_layers=4, tie_word_embeddings=tied))
    layouts = (DENSE if family == "qwen3" else SPARSE)[backend]
    saved = run_ranks(rank_saves, 4, folder, str(tmp_path), layouts)[0]
    # Each is taken over by itself and by the next one, so each is also what another one becomes.
    pairs = sorted({(i, (i + k) % len(layouts)) for i in range(len(layouts)) for k in (0, 1)})
    hops = [(saved[source][0], layouts[target]) for source, target in pairs]
    loaded = run_ranks(rank_loads, 4, folder, str(tmp_path), hops)[0]
    for (source, target), (again, same, got) in zip(pairs, loaded, strict=True):
        checkpoint, uninterrupted = saved[source]
        assert compare(checkpoint, again).same, (layouts[source], layouts[target])
        assert same == (source == target)
        if same:
            assert got == uninterrupted
        reference = Restarted(folder, checkpoint)
        want = [reference.step(tiny_documents(8, seed=n)) for n in range(2, 7)]
        close_to(got, [(w.loss, w.grad_norm) for w in want])


def test_control_a_reference_without_moments_differs(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "qwen3"))
    ((checkpoint, uninterrupted),) = run_ranks(rank_saves, 1, folder, str(tmp_path), [("fsdp", 1, {})])[0]
    reference = Restarted(folder, checkpoint)
    for state in reference.optimizer.state.values():
        state["exp_avg_sq"].mul_(2)
    want = [reference.step(tiny_documents(8, seed=n)) for n in range(2, 7)]
    with pytest.raises(AssertionError):
        close_to(uninterrupted, [(w.loss, w.grad_norm) for w in want])
