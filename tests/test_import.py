"""Checkpoints of other programs, made by those programs' own libraries, become ours; what would run code is refused."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drivetrain.checkpoint_tools import compare, import_checkpoint, inspect, verify
from drivetrain.checkpoint_tools.command import main
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CheckpointError
from drivetrain.workers.losses.sft import SFTLoss
from engines import OPTIM, build, close_to, share
from harness import run_ranks
from test_reshard import Restarted


def sharded(folder: str, mesh_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A plain transformers model under torch's FSDP2, and its optimizer, after two steps. No code of ours in it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        ids = torch.tensor([tiny_documents(2, seed=step)[1]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def rank_dcp(folder: str, out: str, mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = sharded(folder, mesh_shape)
    values, moments = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optim": moments, "step": 2, "note": "plain data"}, checkpoint_id=out)
    return whole_state(model)


def in_transformers(folder: Path, want: dict[str, Tensor]) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    got = dict(loaded[0].named_parameters())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize(("family", "mesh"), [("qwen2", (2,)), ("qwen3_moe", (2,)), ("llama", (2, 2))])
def test_a_dcp_folder_of_an_fsdp_run(family: str, mesh: tuple[int, ...], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, vocab_size=257, tie_word_embeddings=family == "qwen2")
    nproc = 4 if len(mesh) == 2 else 2
    want = run_ranks(rank_dcp, nproc, str(folder), str(tmp_path / "dcp"), mesh)[0]
    import_checkpoint(tmp_path / "dcp", tmp_path / "hf", model=str(folder))
    in_transformers(tmp_path / "hf", want)
    saved = import_checkpoint(tmp_path / "dcp", tmp_path / "c", model=str(folder), to="checkpoint")
    assert saved.name == "step-00000002"
    found = inspect(saved)
    assert set(found.dtypes) == {"value", "exp_avg", "exp_avg_sq"}
    verify(saved)
    assert compare(saved, tmp_path / "hf").same
    # Moments and step counts came too: what follows is what plain Hugging Face makes of them.
    (got,) = run_ranks(rank_goes_on, 1, str(folder), str(saved))
    reference = Restarted(str(folder), str(saved))
    close_to(got, [(s.loss, s.grad_norm) for s in (reference.step(tiny_documents(8, seed=n)) for n in range(4))])


def rank_goes_on(folder: str, saved: str) -> list[tuple[float, float]]:
    engine = build(folder, optim=OPTIM)
    engine.load_checkpoint(saved)
    found = []
    for number in range(4):
        result = engine.train_batch(share(engine, tiny_documents(8, seed=number)), SFTLoss())
        assert result.grad_norm is not None
        found.append((result.loss, result.grad_norm))
    engine.close()
    return found


def rank_verl(folder: str, out: str, mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """What verl's FSDP checkpoint manager writes: each rank its sharded state dict by torch.save, the config beside it."""
    import torch.distributed as dist

    model, optimizer = sharded(folder, mesh_shape)
    rank, size = dist.get_rank(), dist.get_world_size()
    Path(out).mkdir(exist_ok=True)
    torch.save(model.state_dict(), f"{out}/model_world_size_{size}_rank_{rank}.pt")
    names = {p: n for n, p in model.named_parameters()}
    state = {names[p]: s for p, s in optimizer.state.items()}
    torch.save({"state": state, "param_groups": []}, f"{out}/optim_world_size_{size}_rank_{rank}.pt")
    torch.save({"lr_scheduler": None, "rng": {}}, f"{out}/extra_state_world_size_{size}_rank_{rank}.pt")
    if rank == 0:
        model.config.save_pretrained(f"{out}/huggingface")
    return whole_state(model)


@pytest.mark.parametrize(("nproc", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
def test_shards_as_verl_writes_them(nproc: int, mesh: tuple[int, ...], tmp_path: Path) -> None:
    # Sizes that the ranks do not divide.
    folder = save_tiny_model(tmp_path / "model", "llama", vocab_size=257, intermediate_size=90)
    out = tmp_path / "verl"
    want = run_ranks(rank_verl, nproc, str(folder), str(out), mesh)[0]
    import_checkpoint(out, tmp_path / "hf")
    in_transformers(tmp_path / "hf", want)
    saved = import_checkpoint(out, tmp_path / "c", to="checkpoint", model=str(folder))
    assert set(inspect(saved).dtypes) == {"value", "exp_avg", "exp_avg_sq"}
    (out / f"model_world_size_{nproc}_rank_1.pt").unlink()
    with pytest.raises(CheckpointError, match=f"has no file of rank 1 of {nproc}"):
        import_checkpoint(out, tmp_path / "again")


def rank_torch_dist(folder: str, out: str, axes: dict[str, Any], moments: bool) -> dict[str, Tensor]:
    """megatron's own dist_checkpointing of an engine's megatron model."""
    from megatron.core import dist_checkpointing

    from drivetrain.engine.config import ParallelConfig
    from engines import steps, weights

    engine: Any = build(folder, backend="mcore", parallel=ParallelConfig(**axes), optim=OPTIM)
    steps(engine, 2)
    Path(out).mkdir(exist_ok=True)
    with engine._state.entered():
        state: dict[str, Any] = {}
        for i, chunk in enumerate(engine._chunks):
            bare = getattr(chunk, "module", chunk)
            state |= {f"{i}.{k}": v for k, v in bare.sharded_state_dict().items()}
        dist_checkpointing.save({**state, "iteration": 2, "args": {"a": 1}}, out)
    found = weights(engine)
    engine.close()
    return found
