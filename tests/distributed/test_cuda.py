"""Engines on a GPU, against plain Hugging Face on the CPU. Skipped without one."""

import io
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.host_syncs import HostSyncs
from drivetrain.engine.adapter_trainer import AdapterTrainer
from drivetrain.engine.config import LoraConfig, MicroBatchConfig, OffloadConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.reference import PlainReference
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.fsdp.options import FSDPOptions
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import is_installed
from drivetrain.generation.conformance.__main__ import main as conformance
from drivetrain.losses.actions import ActionLoss
from drivetrain.losses.sft import SFTLoss
from helpers.adapters import bank_engine, worst_difference
from helpers.controller import Worker
from helpers.engines import OPTIM, build, reference_steps, steps
from helpers.gpus import VISIBLE, gpu_environment
from helpers.harness import run_ranks
from helpers.media_steps import compare

pytestmark = pytest.mark.gpu

EXACT = PrecisionConfig(params="float32", compute="float32", reduce="float32")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    # Soft caps, sinks and mixtures: FlexAttention and grouped products.
    ("gemma2", {}),
    ("gpt_oss", {}),
    ("qwen3_moe", {}),
    # Queries and keys of another size than values.
    ("deepseek_v3", {}),
    # Windows in 16 bits, and in float32; heads that share keys in float32.
    ("gemma3_text", {}),
    ("gemma3_text", {"precision": EXACT}),
    ("llama", {"precision": EXACT}),
    # Recurrent layers: by flash-linear-attention where it is installed, in float32 by chunks.
    ("qwen3_next", {}),
    ("nemotron_h", {}),
    ("kimi_linear", {}),
    ("jamba", {}),
    ("qwen3_next", {"precision": EXACT}),
    ("llama", {"compile": True}),
    ("llama", {"compile": True, "recompute": "full"}),
    ("gemma2", {"compile": True, "recompute": "selective"}),
    ("llama", {"recompute": "selective"}),
    ("llama", {"recompute": "auto"}),
    ("llama", {"offload": OffloadConfig(optimizer="host")}),
    ("llama", {"options": FSDPOptions(reduce_each_micro_batch=True)}),
    ("llama", {"micro_batch": MicroBatchConfig(max_tokens=64), "deterministic": True}),
    ("qwen3", {"backend": "mcore"}),
    ("qwen3", {"backend": "mcore", "precision": EXACT}),
    ("llama", {"backend": "mcore", "recompute": "full"}),
    ("gemma3_text", {"backend": "mcore"}),
    ("deepseek_v3", {"backend": "mcore"}),
    ("qwen3_moe", {"backend": "mcore"}),
    ("qwen3_next", {"backend": "mcore"}),
]
MEDIA = [
    ("qwen2_5_vl", "fsdp"),
    ("qwen3_vl", "fsdp"),
    ("gemma4", "fsdp"),
    ("qwen2_audio", "fsdp"),
    ("qwen3_5", "fsdp"),
    ("qwen3_vl", "mcore"),
]


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def rank_cuda(folder: str, chosen: dict[str, Any]) -> tuple[list[tuple[float, float]], set[str], list[int]]:
    engine = build(folder, **{"compile": False, **chosen})
    assert chosen.get("precision") is not None or engine.config.precision.compute == "bfloat16"
    found = steps(engine, 2)
    held = [local(tensor) for tensor in engine.state_tensors("params")]
    sizes = [sum(tensor.untyped_storage().nbytes() for tensor in held)]
    engine.to("host")
    sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in held))
    more = steps(engine, 1)
    assert len(more) == 1
    engine.close()
    return found, {tensor.device.type for tensor in held}, sizes


@pytest.mark.parametrize(("family", "chosen"), CASES)
def test_cuda_kernels_agree_with_the_reference(family: str, chosen: dict[str, Any], tmp_path: Path) -> None:
    if not is_installed(chosen.get("backend", "fsdp")):
        pytest.skip(f"{chosen['backend']} is not installed")
    folder = save_tiny_model(tmp_path / "model", family)
    found, devices, (before, after) = run_ranks(rank_cuda, 1, str(folder), chosen, cuda=True, timeout_s=280)[0]
    # The tensors stay where they are; their memory leaves the device.
    assert devices == {"cuda"}
    assert before > 0
    assert after == 0
    loss_bound, norm_bound = (1e-5, 1e-4) if chosen.get("precision") == EXACT else (5e-3, 3e-2)
    for (loss, norm), (want_loss, want_norm) in zip(found, reference_steps(folder, 2), strict=True):
        assert loss == pytest.approx(want_loss, rel=loss_bound)
        assert norm == pytest.approx(want_norm, rel=norm_bound)


def rank_media(folder: str, family: str, backend: str) -> list[list[tuple[float, float]]]:
    return [
        compare(Path(folder), family, ParallelConfig(), backend, precision=precision, compile=False)
        for precision in (EXACT, PrecisionConfig())
    ]


@pytest.mark.parametrize(("family", "backend"), MEDIA)
def test_media_on_cuda_equal_plain_transformers(family: str, backend: str, tmp_path: Path) -> None:
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    folder = save_tiny_model(tmp_path / "model", family)
    (found,) = run_ranks(rank_media, 1, str(folder), family, backend, cuda=True, timeout_s=280)
    for differences, loss_bound, norm_bound in zip(found, (1e-5, 1e-2), (1e-4, 5e-2), strict=True):
        assert len(differences) == 5
        assert all(loss <= loss_bound and norm <= norm_bound for loss, norm in differences), found


def with_prefixes() -> list[list[int]]:
    """Three prompts with three answers each, and documents of their own."""
    prompts, answers = tiny_documents(4, seed=0)[1:], tiny_documents(12, seed=1, longest=16)
    return [*(prompts[i % 3] + answers[i] for i in range(9)), *answers[9:]]


def rank_prefixes(folder: str, settings: dict[str, Any]) -> tuple[float, float | None, int]:
    engine = build(folder, compile=False, share_prefixes="on", micro_batch=MicroBatchConfig(max_tokens=512), **settings)
    result = engine.train_batch(from_lists(with_prefixes()), SFTLoss())
    engine.close()
    return result.loss, result.grad_norm, result.shared_tokens


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_next"])
def test_shared_prefixes_on_cuda_equal_plain_transformers(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", family)
    expected = PlainReference(folder, OPTIM).step(with_prefixes())
    for settings, loss_bound, norm_bound in (({"precision": EXACT}, 1e-5, 1e-4), ({}, 5e-3, 3e-2)):
        loss, norm, shared = run_ranks(rank_prefixes, 1, str(folder), settings, cuda=True, timeout_s=280)[0]
        assert shared > 0
        assert loss == pytest.approx(expected.loss, rel=loss_bound)
        assert norm == pytest.approx(expected.grad_norm, rel=norm_bound)


def rank_heads_and_adapters(folder: str, model: dict[str, Any]) -> list[tuple[float, float | None]]:
    g = torch.Generator().manual_seed(0)
    engine = build(folder, model=model, precision=EXACT, compile=False)
    found = []
    for step in range(3):
        batch: Any = from_lists(tiny_documents(8, seed=step))
        loss: Any = SFTLoss()
        if model.get("head") == "actions":
            shape = (len(batch.input_ids), *model["head_shape"])
            batch = batch.with_fields(
                actions=torch.randn(shape, generator=g), action_mask=torch.ones(shape[:2], dtype=torch.bool)
            )
            loss = ActionLoss()
        result = engine.train_batch(batch, loss)
        found.append((result.loss, result.grad_norm))
    engine.close()
    return found


@pytest.mark.parametrize("model", [{"lora": LoraConfig(rank=4)}, {"head": "actions", "head_shape": (4, 3)}])
def test_heads_and_adapters_on_cuda_equal_those_on_the_cpu(model: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    found, expected = (run_ranks(rank_heads_and_adapters, 1, str(folder), model, cuda=cuda)[0] for cuda in (True, False))
    for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def rank_adapters(folder: str, settings: dict[str, Any]) -> float:
    engine = bank_engine(folder, **{"micro_batch": MicroBatchConfig(max_tokens=64), **settings})
    try:
        return worst_difference(AdapterTrainer(engine), folder)
    finally:
        engine.close()


@pytest.mark.parametrize("precision", [EXACT, PrecisionConfig()], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"compile": False, "recompute": "full"}),
        ("qwen3_moe", {}),
        ("llama", {"backend": "mcore"}),
        ("qwen3_moe", {"backend": "mcore", "recompute": "full"}),
    ],
)
def test_adapters_side_by_side_on_cuda_equal_plain_peft(
    family: str, settings: dict[str, Any], precision: PrecisionConfig, tmp_path: Path
) -> None:
    if not is_installed(settings.get("backend", "fsdp")):
        pytest.skip(f"{settings['backend']} is not installed")
    folder = str(save_tiny_model(tmp_path / "model", family))
    (worst,) = run_ranks(rank_adapters, 1, folder, {**settings, "precision": precision}, cuda=True, timeout_s=280)
    assert worst < (1e-4 if precision == EXACT else 0.15)


def rank_samples_of_adapters(folder: str, root: str) -> None:
    from helpers.adapter_samples import check_generator, saved_adapters

    with saved_adapters(Path(folder), Path(root), precision=EXACT) as saved:
        for kind in ("static", "continuous"):
            check_generator(saved, kind, dtype="float32", tolerance=1e-4)


def test_samples_of_adapters_side_by_side_on_cuda(tmp_path: Path) -> None:
    # The group of workers needs it, and a GPU machine may lack it.
    pytest.importorskip("msgspec")
    folder = save_tiny_model(tmp_path / "model", "llama", tie_word_embeddings=False)
    run_ranks(rank_samples_of_adapters, 1, str(folder), str(tmp_path), cuda=True, timeout_s=280)


def rank_conformance(words: list[str]) -> tuple[int, str]:
    shown = io.StringIO()
    with redirect_stdout(shown):
        code = conformance(words)
    return code, shown.getvalue()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("name", ["static", "continuous"])
def test_generators_on_cuda_do_what_their_interface_says(name: str, family: str) -> None:
    """In float32, beside plain transformers on the CPU."""
    code, shown = run_ranks(rank_conformance, 1, [name, "--family", family], cuda=True, timeout_s=280)[0]
    assert code == 0, shown


@pytest.mark.parametrize("backend", ["fsdp", "mcore"])
def test_engines_on_cuda_do_what_their_interface_says(backend: str, real_commands: None) -> None:
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    words = [sys.executable, "-m", "drivetrain.cli", "conformance", backend]
    done = subprocess.run(words, env=gpu_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("0 failed, on 1 processes with cuda")


def rank_waits(folder: str, backend: str, compiled: bool) -> tuple[int, dict[str, int], dict[str, int]]:
    sizes = MicroBatchConfig(max_tokens=32, infer_max_tokens=32)
    engine = build(folder, backend=backend, compile=compiled, micro_batch=sizes)
    batch = from_lists([list(range(i, i + 20)) for i in (3, 10, 20)])
    # The first calls allocate and compile.
    engine.train_batch(batch, SFTLoss())
    engine.infer_batch(batch, OutputRequest(log_probs=True))
    torch.cuda.synchronize()
    with HostSyncs("cuda") as training:
        count = engine.train_batch(batch, SFTLoss()).micro_batches
    with HostSyncs("cuda") as inference:
        engine.infer_batch(batch, OutputRequest(log_probs=True))
    engine.close()
    return count, dict(training.places), dict(inference.places)


@pytest.mark.parametrize(("backend", "compiled"), [("fsdp", False), ("fsdp", True), ("mcore", False)])
def test_the_host_seldom_waits_for_the_device(backend: str, compiled: bool, tmp_path: Path) -> None:
    if not is_installed(backend):
        pytest.skip(f"{backend} is not installed")
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    count, training, inference = run_ranks(rank_waits, 1, str(folder), backend, compiled, cuda=True, timeout_s=280)[0]
    # Two per micro-batch; then the sums of the loss, and the norm. See `benchmarks/host_syncs.py`.
    assert sum(training.values()) <= 2 * count + 2, training
    assert sum(inference.values()) <= count + 1, inference


def rank_recompiles(folder: str) -> list[int]:
    from torch._dynamo.utils import counters

    engine = build(folder, compile=True, recompute="full")
    found = []
    for step in range(20):
        batch = from_lists([list(range(3, 3 + 2 + (7 * step + 3 * i) % 19)) for i in range(1 + step % 4)])
        engine.train_batch(batch, SFTLoss())
        found.append(counters["stats"]["unique_graphs"])
    engine.close()
    return found


def test_layers_are_compiled_once_for_all_lengths(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    (graphs,) = run_ranks(rank_recompiles, 1, str(folder), cuda=True, timeout_s=280)
    assert 0 < graphs[0] <= 2
    # Outputs and gradient of the head are compiled for the first batch of several tokens.
    assert graphs[-1] == graphs[1] == graphs[0] + 2


def test_a_worker_meets_on_nccl_and_answers_from_its_gpu() -> None:
    # The other tests of workers are not for a GPU machine, which may lack these packages.
    for name in ("msgspec", "zmq"):
        pytest.importorskip(name)
    from drivetrain.workers.protocol.comm_id import mint

    comm_id, listener = mint()
    listener.close()
    allow = ("--allow", "helpers.roles:Troubled", "--allow", "helpers.roles:Trouble")
    with Worker(0, 1, *allow, environment={VISIBLE: gpu_environment().get(VISIBLE)}) as worker:
        worker.join(comm_id.hex())
        assert worker.ask({"op": "nccl_sanity_check"}) == {"op": "nccl_sanity_result", "observed_sum": 1}
        worker.initialize("troubled", "Troubled", {"rank": -1})
        # An int32 one, from the device.
        request = {"op": "call", "id": 1, "role": "troubled", "method": "on_device", "args": []}
        assert worker.ask_flushed(request)["result"] == {"$": "tensor", "dtype": "int32", "shape": [1], "data": "AQAAAA=="}
        assert worker.ask({"op": "shutdown"}) == {"op": "bye"}
        assert worker.process.wait(30) == 0
