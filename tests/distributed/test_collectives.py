"""An error of one rank is raised on all, whatever each of them was doing."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import RemoteError
from drivetrain.engine.loss import LossSums, OutputRequest, TokenOutputs
from drivetrain.engine.packing.batch import PackedBatch
from drivetrain.engine.parallel.collectives import (
    all_gather_object,
    broadcast_object,
    call_on_first,
    collective_errors,
    ranks_notified_of,
)
from drivetrain.engine.registry import engine_class
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, share, steps
from helpers.harness import run_ranks

STEPS = ("check_model", "build_model", "build_optimizer", "finish_build")


def outcome(run: Any) -> str:
    try:
        run()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def rank_blocks() -> list[str]:
    """Errors before, inside and behind nested blocks; after each of them the ranks still meet."""
    rank = dist.get_rank()

    def fail_at(here: str, where: str, failing: int) -> None:
        if (here, rank) == (where, failing):
            raise ValueError(f"planted {where}")

    def nested(where: str, failing: int) -> None:
        with collective_errors():
            fail_at("before", where, failing)
            with collective_errors():
                fail_at("inside", where, failing)
            # Not a block but an exchange of values.
            fail_at("between", where, failing)
            assert all_gather_object(rank) == list(range(dist.get_world_size()))
            fail_at("behind", where, failing)

    found = []
    for where in ("before", "inside", "between", "behind", "nowhere"):
        for failing in (0, dist.get_world_size() - 1):
            got = outcome(lambda where=where, failing=failing: nested(where, failing))
            want = (
                f"ValueError: planted {where}"
                if rank == failing
                else f"RemoteError: rank {failing} failed: ValueError: planted {where}"
            )
            assert got == ("no error" if where == "nowhere" else want), (got, want)
            found.append(got)
            assert all_gather_object("together") == ["together"] * dist.get_world_size()
    return found


@pytest.mark.parametrize("nproc", [2, 4])
def test_blocks_may_be_nested(nproc: int) -> None:
    assert len(run_ranks(rank_blocks, nproc)[0]) == 10


def rank_same_error() -> None:
    """One object that is raised again, as a module's own error may be, is a new error to a new block."""
    error = ValueError("planted")

    def fail(failing: int) -> None:
        with collective_errors():
            if dist.get_rank() == failing:
                raise error

    for failing in (0, 1, 0):
        got = outcome(lambda failing=failing: fail(failing))
        assert got.startswith("ValueError" if dist.get_rank() == failing else "RemoteError")


def test_an_error_may_be_raised_twice() -> None:
    run_ranks(rank_same_error, 2)


@dataclass(frozen=True)
class Shapeless:
    """A loss whose term, or whose metric, is not a number on one rank."""

    wrong: str
    request = OutputRequest(log_probs=True)
    linear = False
    tokens, weights = SFTLoss().tokens, SFTLoss().weights

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> LossSums:
        sums = SFTLoss()(outputs, batch)
        if dist.get_rank() == 0:
            return sums
        assert outputs.log_probs is not None
        if self.wrong == "term":
            return LossSums(terms={"nll": outputs.log_probs})
        return LossSums(terms=sums.terms, metrics={"nll": (outputs.log_probs, 1.0)})


def rank_loss(folder: str, wrong: str) -> str:
    with contextlib.closing(build(folder)) as engine:
        batch = share(engine, tiny_documents(8, seed=0))
        got = outcome(lambda: engine.train_batch(batch, Shapeless(wrong)))
        # Nothing of it is left.
        assert engine.train_batch(batch, SFTLoss()).loss > 0
        return got


@pytest.mark.parametrize("wrong", ["term", "metric"])
def test_a_loss_of_a_wrong_shape_is_one_error_on_all_ranks(wrong: str, tmp_path: Path) -> None:
    one, other = run_ranks(rank_loss, 2, str(save_tiny_model(tmp_path / "model", "llama")), wrong)
    assert one == f"RemoteError: rank 1 failed: {other}"
    assert ("a term is a scalar sum" in other) == (wrong == "term")


def rank_first() -> None:
    groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    rank, calls = dist.get_rank(), []

    def run() -> int:
        calls.append(rank)
        return rank

    assert call_on_first(run, groups[rank // 2]) == rank // 2 * 2
    assert calls == ([rank] if rank % 2 == 0 else [])
    assert broadcast_object([rank], groups[rank // 2]) == [rank // 2 * 2]
    got = outcome(lambda: broadcast_object(None, error=ValueError("planted") if rank == 2 else None))
    assert got == ("ValueError: planted" if rank == 2 else "RemoteError: rank 2 failed: ValueError: planted")
    got = outcome(lambda: call_on_first(lambda: dict[str, int]()["planted"]))
    assert got == ("KeyError: 'planted'" if rank == 0 else "RemoteError: rank 0 failed: KeyError: 'planted'")


def test_the_first_rank_of_a_group_is_called() -> None:
    run_ranks(rank_first, 4)


def rank_subgroup() -> None:
    """What two of four ranks know of is still exchanged with the others."""
    groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    rank = dist.get_rank()

    def run() -> None:
        with collective_errors(), collective_errors(groups[rank // 2]):
            if rank == 1:
                raise ValueError("planted")

    with pytest.raises(ValueError if rank == 1 else RemoteError) as caught:
        run()
    assert ranks_notified_of(caught.value) == frozenset(range(4))


def test_an_error_of_a_subgroup_reaches_the_larger_group() -> None:
    run_ranks(rank_subgroup, 4)


def failing_engine(backend: str, step: str, after: bool, failing: int) -> type[BaseEngine]:
    base = engine_class(backend)

    def planted(self: Any, *args: Any) -> Any:
        here = self._topology is not None and self.topology.rank == failing
        if here and not after:
            raise RuntimeError(f"planted in {step}")
        result = getattr(super(Failing, self), step)(*args)
        if here:
            raise RuntimeError(f"planted in {step}")
        return result

    class Failing(base):  # type: ignore[misc, valid-type]
        pass

    setattr(Failing, step, planted)
    return Failing


def rank_build(folder: str, backend: str, axes: dict[str, Any], init: str) -> int:
    count = 0
    for step in STEPS:
        for after in (False, True):
            for failing in {0, dist.get_world_size() - 1}:
                engine = failing_engine(backend, step, after, failing)(
                    model=ModelConfig(path=folder, init=init),  # type: ignore[arg-type]
                    engine=EngineConfig(
                        backend=backend, parallel=ParallelConfig(**axes), micro_batch=MicroBatchConfig(max_tokens=128)
                    ),
                    optim=OPTIM,
                )
                got = outcome(engine.initialize)
                own = f"RuntimeError: planted in {step}"
                want = own if dist.get_rank() == failing else f"RemoteError: rank {failing} failed: {own}"
                assert got == want, (step, after, failing, got)
                count += 1
    # All groups were given back: the next engine works.
    engine = build(folder, model={"init": init}, backend=backend, parallel=ParallelConfig(**axes))
    assert steps(engine, 1)[0][0] > 0
    engine.close()
    return count


@pytest.mark.parametrize(
    ("backend", "nproc", "axes", "init"),
    [
        ("fsdp", 2, {"cp": 2}, "weights"),
        pytest.param("mcore", 2, {"tp": 2}, "random", marks=pytest.mark.slow),
        pytest.param("fsdp", 4, {"dp_replicate": 2, "cp": 2}, "random", marks=pytest.mark.slow),
        pytest.param("mcore", 4, {"tp": 2, "pp": 2}, "weights", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_in_a_build_step_fails_on_all(
    backend: str, nproc: int, axes: dict[str, Any], init: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    assert run_ranks(rank_build, nproc, str(folder), backend, axes, init)[0] == len(STEPS) * 2 * 2
