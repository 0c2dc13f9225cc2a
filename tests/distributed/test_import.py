"""Checkpoints of other programs, made by those programs' own libraries, become ours; what would run code is refused."""

import hashlib
import json
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from drivetrain.checkpoint_tools import compare, import_checkpoint, inspect, verify
from drivetrain.checkpoint_tools.commands import main
from drivetrain.engine.config import ParallelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CheckpointError
from drivetrain.losses.sft import SFTLoss
from helpers.engines import OPTIM, build, close_to, share
from helpers.harness import run_ranks
from helpers.restarted import Restarted


def auto_class(folder: Any) -> Any:
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForMultimodalLM if hasattr(config, "vision_config") else AutoModelForCausalLM


def sharded(folder: str, mesh_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """A plain transformers model under torch's FSDP2, and its optimizer, after two steps. No code of ours in it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model: Any = auto_class(folder).from_pretrained(folder, dtype=torch.float32)
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        ids = torch.tensor([tiny_documents(2, seed=step)[1]])
        loss = model(input_ids=ids, labels=ids).loss
        # Without an image the parameters of an encoder would have no state.
        (loss + sum(p.sum() * 0.0 for n, p in model.named_parameters() if "visual" in n)).backward()
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
    loaded: Any = auto_class(folder).from_pretrained(folder, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    got = dict(loaded[0].named_parameters())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen2", (2,)),
        ("qwen3_moe", (2,)),
        ("llama", (2, 2)),
        ("qwen3_vl", (2,)),
    ],
)
def test_a_dcp_folder_of_an_fsdp_run(family: str, mesh: tuple[int, ...], tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"text_config": {"vocab_size": 257}} if family == "qwen3_vl" else {"vocab_size": 257}
    folder = save_tiny_model(tmp_path / "model", family, **sizes, tie_word_embeddings=family == "qwen2")
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
    found = train(engine, range(4))
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


@pytest.mark.parametrize(("nproc", "mesh"), [(2, (2,)), pytest.param(4, (4,), marks=pytest.mark.slow), (4, (2, 2))])
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


def rank_torch_dist(folder: str, out: str, axes: dict[str, Any]) -> dict[str, Tensor]:
    """megatron's own dist_checkpointing of megatron's own model: its layer spec, its names, no module of ours.

    Returns this rank's tensors, by name. The engine gives process groups and configuration alone.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from drivetrain.engine.mcore.config import transformer_config

    # megatron writes from processes of its own, which a daemon may not have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    engine: Any = build(folder, backend="mcore", parallel=ParallelConfig(**axes), optim=OPTIM)
    Path(out).mkdir(exist_ok=True)
    with engine._state.active():
        chunk = getattr(engine._chunks[0], "module", engine._chunks[0])
        decoder = engine._architecture.decoder
        config = transformer_config(decoder, engine.config, engine.options, engine.topology.parallel)
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            -(-decoder.vocabulary // 16) * 16,
            256,
            pre_process=chunk.pre_process,
            post_process=chunk.post_process,
            share_embeddings_and_output_weights=decoder.tied,
            position_embedding_type="rope",
            pg_collection=engine._state.groups,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Tensor-parallel ranks hold the same of what is not split.
                split = getattr(parameter, "tensor_model_parallel", False) or "experts" in name
                place = f"{name} {engine.topology.pp_rank} {torch.distributed.get_rank() if split else 0}"
                seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4], "big")
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
        state = model.sharded_state_dict(metadata={"non_homogeneous_layers": bool(config.num_moe_experts)})
        dist_checkpointing.save({**state, "iteration": 2, "args": {"lr": 1.0}}, out)
    engine.close()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def rank_local(folder: str, axes: dict[str, Any]) -> dict[str, Tensor]:
    """What our engine holds of a Hugging Face folder, by megatron's names."""
    engine: Any = build(folder, backend="mcore", parallel=ParallelConfig(**axes), optim=None)
    chunk = getattr(engine._chunks[0], "module", engine._chunks[0])
    found = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", {"pp": 2}),
        ("qwen2", {"tp": 2}),
        ("qwen3", {"tp": 2}),
        ("qwen3_moe", {"ep": 2}),
    ],
)
def test_a_torch_dist_folder_of_megatron(family: str, axes: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family, vocab_size=257, tie_word_embeddings=family == "qwen2")
    theirs = run_ranks(rank_torch_dist, 2, str(folder), str(tmp_path / "iter_0000002"), axes)
    import_checkpoint(tmp_path / "iter_0000002", tmp_path / "hf", model=str(folder))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    for want, got in zip(theirs, run_ranks(rank_local, 2, str(tmp_path / "hf"), axes), strict=True):
        seen = 0
        for name, value in got.items():
            if ".mlp.experts." in name:
                layer, _, leaf = name.partition(".mlp.experts.")
                apart = [v for n, v in sorted(want.items()) if n.startswith(f"{layer}.mlp.experts.") and n.endswith(leaf)]
                assert len(apart) == 2
                assert torch.equal(value, torch.cat(apart))
            elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                # Padded to another multiple: the rows that both have.
                rows = min(len(value), len(want[name])) if axes.get("tp", 1) == 1 else 0
                assert torch.equal(value[:rows][:257], want[name][:rows][:257])
            else:
                assert torch.equal(value, want[name]), name
            seen += 1
        assert seen == len(got)
    with pytest.raises(CheckpointError, match="has no optimizer moments to resume from"):
        import_checkpoint(tmp_path / "iter_0000002", tmp_path / "c", to="checkpoint", model=str(folder), step=2)
    # megatron pads the vocabulary; its rows, of both ranks, are those of the model and zeros or noise behind them.
    embeddings = (
        torch.cat([t["embedding.word_embeddings.weight"] for t in theirs])
        if axes.get("tp")
        else theirs[0]["embedding.word_embeddings.weight"]
    )
    assert torch.equal(loaded[0].get_input_embeddings().weight, embeddings[:257])


def rank_with_moments(folder: str, out: str) -> list[tuple[float, float]]:
    """Saved by megatron's dist_checkpointing with its distributed optimizer; and three steps that follow."""
    from megatron.core import dist_checkpointing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    engine: Any = build(folder, backend="mcore", parallel=ParallelConfig(tp=2), optim=OPTIM)
    train(engine, range(2))
    Path(out).mkdir(exist_ok=True)
    groups = engine._state.groups
    with engine._state.active():
        state = engine._chunks[0].module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": groups.dp_cp,
            "chained_optim_avoid_prefix": True,
        }
        moments = engine._optimizer._parts[0].sharded_state_dict(state, metadata=metadata)
        dist_checkpointing.save({**state, "optimizer": moments, "iteration": 2}, out)
    found = train(engine, range(2, 5))
    engine.close()
    return found


def rank_resumes(folder: str, saved: str, backend: str) -> list[tuple[float, float]]:
    engine = build(folder, backend=backend, optim=OPTIM)
    assert engine.load_checkpoint(saved).step == 2
    found = train(engine, range(2, 5))
    engine.close()
    return found


def train(engine: Any, numbers: range) -> list[tuple[float, float]]:
    results = [engine.train_batch(share(engine, tiny_documents(8, seed=n)), SFTLoss()) for n in numbers]
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.slow
def test_megatrons_moments_come_too(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    source = tmp_path / "iter_0000002"
    want = run_ranks(rank_with_moments, 2, folder, str(source))[0]
    saved = import_checkpoint(source, tmp_path / "c", to="checkpoint", model=folder)
    for backend in ("mcore", "fsdp"):
        close_to(run_ranks(rank_resumes, 2, folder, str(saved), backend)[0], want)
    source.rename(tmp_path / "nameless")
    with pytest.raises(CheckpointError, match="does not record how many steps its optimizer took"):
        import_checkpoint(tmp_path / "nameless", tmp_path / "c", to="checkpoint", model=folder)


# ---- what would run code -----------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    dcp, verl, mark = tmp_path / "dcp", tmp_path / "verl", tmp_path / "mark"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(pickle.dumps({"a": Bomb(mark)}))
    verl.mkdir()
    torch.save({"model.norm.weight": Bomb(mark)}, verl / "model_world_size_1_rank_0.pt")
    for source in (dcp, verl):
        with pytest.raises(CheckpointError, match="--trust-pickle"):
            import_checkpoint(source, tmp_path / "out", model=str(folder))
        assert not mark.exists()
        assert main("import", [str(source), str(tmp_path / "out"), "--model", str(folder)]) == 1
        assert "could run code" in capsys.readouterr().err
    # Asked for, it is loaded, and found to be no checkpoint.
    with pytest.raises(CheckpointError):
        import_checkpoint(dcp, tmp_path / "out", model=str(folder), trust_pickle=True)
    assert mark.exists()


def test_a_pickle_that_changes_classes_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import StorageMeta

    folder = save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "dcp").mkdir()
    # The class on the stack, then BUILD with attributes: what no honest pickle does.
    code = b"\x80\x02ctorch.distributed.checkpoint.metadata\nStorageMeta\n}X\x03\x00\x00\x00badX\x01\x00\x00\x00xsb."
    for text in (code, code.replace(b"}X", b"N}X").replace(b"sb.", b"s\x86b.")):
        (tmp_path / "dcp" / ".metadata").write_bytes(text)
        with pytest.raises(CheckpointError, match="tries to change"):
            import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(folder))
        assert not hasattr(StorageMeta, "bad")


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"tie_word_embeddings": True}])
def test_a_model_of_another_depth_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    other = save_tiny_model(tmp_path / "other", "qwen3", **{"num_hidden_layers": 2, **change})
    run_ranks(rank_hostile, 1, str(folder), str(tmp_path / "dcp"))
    if "tie_word_embeddings" in change:
        # Both names, of which a tied model has one: that they are equal cannot be told from names.
        import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(other))
        return
    with pytest.raises(CheckpointError, match="of a different model than"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(other))
    wrong = save_tiny_model(tmp_path / "wrong", "llama", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"q_norm.* of a different model than"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(wrong))


def rank_hostile(folder: str, out: str) -> None:
    rank_dcp(folder, out, (1,))


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    run_ranks(rank_hostile, 1, str(folder), str(tmp_path / "dcp"))
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    good = path.read_bytes()
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", "/etc/hostname", "nothing"):
        for place in metadata.storage_data.values():
            place.relative_path = name
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="which is not a file in the folder"):
            import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(folder))
    # A chunk whose bytes are another tensor.
    path.write_bytes(good)
    metadata = pickle.loads(good)
    places = list(metadata.storage_data.values())
    for place in places:
        place.offset, place.length = places[0].offset, places[0].length
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="are not the expected part of"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=str(folder))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_imported_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    other = save_tiny_model(tmp_path / "other", "qwen3", hidden_size=32, num_attention_heads=4)
    (tmp_path / "empty").mkdir()
    run_ranks(rank_hostile, 1, str(folder), str(tmp_path / "run" / "dcp"))
    for arguments, message in (
        ({"source": tmp_path / "nowhere"}, "is not a folder"),
        ({"source": tmp_path / "empty"}, "is not a checkpoint that can be imported"),
        ({"source": tmp_path / "run"}, r"did you mean .*dcp\?"),
        ({"source": tmp_path / "run" / "dcp"}, "set --model"),
        ({"source": tmp_path / "run" / "dcp", "model": str(other)}, "has none of the model's parameters|of a different model"),
        ({"source": tmp_path / "run" / "dcp", "model": str(folder), "dtype": "int8"}, "dtype=int8; it must be one of"),
        ({"source": tmp_path / "run" / "dcp", "model": str(folder), "to": "gguf"}, "to=gguf; it must be hf or checkpoint"),
        (
            {"source": tmp_path / "run" / "dcp", "model": str(folder), "kind": "torch_dist"},
            "has no tensors of a Megatron model",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(**arguments, output=tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    words = [str(tmp_path / "run" / "dcp"), str(tmp_path / "out"), "--model", str(folder)]
    assert main("import", [*words, "--dry-run"]) == 0
    assert "model.safetensors: 21 tensors, F32" in capsys.readouterr().out
    assert main("import", [*words, "--dtype", "bfloat16"]) == 0
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
