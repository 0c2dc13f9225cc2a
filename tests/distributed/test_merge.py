"""merge, inspect and verify: what they write loads in plain transformers and peft, and is what an engine exports."""

import contextlib
import filecmp
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from drivetrain.checkpoint_tools import compare, inspect, merge, verify
from drivetrain.checkpoint_tools.commands import _size, main
from drivetrain.engine.base import BaseEngine
from drivetrain.engine.config import LoraConfig, ParallelConfig, PrecisionConfig
from drivetrain.engine.conformance.tiny import save_tiny_model, tiny_documents
from drivetrain.engine.errors import CheckpointError
from drivetrain.engine.export import export_hf
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.convert import from_lists
from helpers.engines import build, steps
from helpers.harness import run_ranks
from helpers.texts import byte_tokenizer, save_text_model

LORA = {"lora": LoraConfig(rank=4, alpha=8.0)}
RSLORA = {"lora": LoraConfig(rank=4, alpha=8.0, rslora=True)}
EXPERTS = {"lora": LoraConfig(rank=3, alpha=8.0, targets=("q_proj", "experts"))}
VOCABULARY = {"lora": LoraConfig(rank=3, alpha=8.0, targets=("all-linear", "embed_tokens", "lm_head"))}
SAVED = {"lora": LoraConfig(rank=4, alpha=8.0, modules_to_save=("embed_tokens", "lm_head", "norm"))}
"""Embeddings, head and the last norm are trained in full beside the adapters; peft would take `norm` for the layers' norms too."""
TIED = {"lora": LoraConfig(rank=4, alpha=8.0, modules_to_save=("embed_tokens",))}

GENERATION = {"eos_token_id": [2, 7], "temperature": 0.3, "do_sample": False}
"""Settings that contradict each other, as some models' on the Hub do; transformers loads them and refuses to save them."""


def rank_trains(folder: str, root: str, backend: str, axes: dict[str, Any], settings: dict[str, Any]) -> tuple[str, Any]:
    """A checkpoint, the engine's own exports, and what the trained model says of some documents."""
    parallel = ParallelConfig(**axes)
    with contextlib.closing(build(folder, backend=backend, parallel=parallel, **settings)) as engine:
        steps(engine, 2)
        saved = engine.save_checkpoint(root, 2)
        export_hf(engine, f"{root}/export", shard_bytes=200_000)
        if settings:
            export_hf(engine, f"{root}/adapter", adapters="only")
        batch = from_lists(tiny_documents(4, seed=9))
        found = engine.infer_batch(batch, OutputRequest(log_probs=True))
        return saved, found.get("log_probs")


def log_probs(model: Any) -> Tensor:
    """Of plain transformers, document by document."""
    found = []
    for document in tiny_documents(4, seed=9):
        ids = torch.tensor([document])
        with torch.no_grad():
            every = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        found += [every.gather(-1, ids[0, 1:, None])[:, 0], torch.zeros(1)]
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "backend", "nproc", "axes", "settings"),
    [
        ("qwen2", "fsdp", 2, {}, {}),
        ("qwen3_moe", "fsdp", 2, {"ep": 2}, {}),
        ("llama", "fsdp", 2, {"cp": 2}, {"model": LORA}),
        ("qwen3", "mcore", 2, {"tp": 2, "tp_sequence": True}, {}),
        pytest.param("qwen2", "mcore", 2, {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "mcore", 4, {"pp": 2, "ep": 2}, {}, marks=pytest.mark.slow),
        ("llama", "mcore", 2, {"tp": 2}, {"model": LORA}),
        pytest.param("phi3", "mcore", 2, {"tp": 2}, {"model": RSLORA}, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", 1, {}, {"model": RSLORA}, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", 2, {}, {"model": SAVED}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "fsdp", 2, {"ep": 2}, {"model": EXPERTS}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "fsdp", 2, {}, {"model": EXPERTS}, marks=pytest.mark.slow),
        pytest.param(
            "mixtral", "mcore", 2, {"tp": 2, "tp_sequence": True, "etp": 2}, {"model": EXPERTS}, marks=pytest.mark.slow
        ),
        pytest.param("gpt_oss", "mcore", 2, {"pp": 2}, {"model": EXPERTS}, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp", 2, {}, {"model": VOCABULARY}, marks=pytest.mark.slow),
        pytest.param("llama", "mcore", 2, {"tp": 2}, {"model": VOCABULARY}, marks=pytest.mark.slow),
        pytest.param("llama", "mcore", 2, {"tp": 2}, {"model": SAVED}, marks=pytest.mark.slow),
        pytest.param("llama", "mcore", 2, {"pp": 2}, {"model": SAVED}, marks=pytest.mark.slow),
        pytest.param("qwen2", "fsdp", 1, {}, {"model": TIED}, marks=pytest.mark.slow),
        pytest.param("qwen2", "mcore", 2, {"pp": 2}, {"model": TIED}, marks=pytest.mark.slow),
        pytest.param("smollm3", "mcore", 2, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("olmo3", "mcore", 2, {"tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "mcore", 2, {"pp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", "mcore", 2, {"tp": 2, "tp_sequence": True}, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "mcore", 2, {"tp": 2, "tp_sequence": True, "ep": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_merged_checkpoint_is_the_trained_model(
    family: str, backend: str, nproc: int, axes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    tied = family == "qwen2"
    folder = save_tiny_model(tmp_path / "model", family, vocab_size=257, tie_word_embeddings=tied)
    root = tmp_path / "c"
    outputs = run_ranks(rank_trains, nproc, str(folder), str(root), backend, axes, settings)
    saved, want = next((o for o in outputs if o[1] is not None), outputs[0])
    out = tmp_path / "merged"
    merge(saved, out, shard_bytes=200_000)
    # What an engine exports while it trains is what a merge makes of its checkpoint, file by file.
    result = compare(root / "export", out)
    assert result.same or result.largest <= 1e-7, result
    names = sorted(p.name for p in (root / "export").iterdir())
    assert names == sorted(p.name for p in out.iterdir())
    for name in names:
        if not settings or name.endswith(".json"):
            assert filecmp.cmp(root / "export" / name, out / name, shallow=False), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    assert loaded[0].config.tie_word_embeddings == tied
    assert torch.allclose(log_probs(loaded[0]), want, atol=2e-5)
    if settings:
        from peft import PeftModel

        merge(saved, tmp_path / "adapter", adapters="only")
        assert compare(root / "adapter", tmp_path / "adapter").same
        base: Any = AutoModelForCausalLM.from_pretrained(folder)
        adapted: Any = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        assert torch.allclose(log_probs(adapted), want, atol=2e-5)
        # Not merged at all, it would be the base.
        assert not torch.allclose(log_probs(AutoModelForCausalLM.from_pretrained(folder)), want, atol=1e-5)


@pytest.fixture
def trained(tmp_path: Path, process_group: None) -> tuple[BaseEngine, str]:
    folder = save_tiny_model(tmp_path / "model", "llama")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    engine = build(folder)
    steps(engine, 1)
    return engine, engine.save_checkpoint(tmp_path / "c", 1)


@pytest.mark.parametrize(("model", "tied", "ends"), [({}, True, 2), ({}, False, [0, 1, 2]), (LORA, False, 2)])
def test_a_value_model_is_a_classifier_of_one_label(
    model: dict[str, Any],
    tied: bool,
    ends: int | list[int],
    tmp_path: Path,
    process_group: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a model that is padded with its end token, which transformers' classifiers skip and training does not."""
    folder = save_text_model(tmp_path / "model", "qwen3", tie_word_embeddings=tied, pad_token_id=2)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with contextlib.closing(build(folder, model={"head": "value", **model}, optim=None)) as engine:
        documents = [[*document, 2] for document in tiny_documents(3, seed=4)]
        want = engine.infer_batch(from_lists(documents), OutputRequest(values=True))["values"]
        saved = engine.save_checkpoint(tmp_path / "c", 1)
        export_hf(engine, tmp_path / "export")
    merge(saved, tmp_path / "out")
    assert compare(tmp_path / "export", tmp_path / "out").same
    loaded: Any = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    # Its head has a bias, which is new and zero.
    assert loaded[1]["missing_keys"] <= {"score.bias"}
    with torch.no_grad():
        got = torch.cat([loaded[0].eval()(input_ids=torch.tensor([d])).logits[0, :, 0] for d in documents])
        assert torch.allclose(got, want, atol=1e-5)
        scores: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
        last = torch.cat([scores(input_ids=torch.tensor([d])).logits[0] for d in documents])
        bounds = torch.tensor([len(d) for d in documents]).cumsum(0) - 1
        assert torch.allclose(last, want[bounds], atol=1e-5)
        exported: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
        # All special tokens may end a sequence: nothing can pad, which is told once, and refused by transformers.
        alone = ends == [0, 1, 2]
        assert caplog.text.count("its vocabulary has no special token that could pad a batch") == int(alone)
        assert (scores.config.pad_token_id, exported.pad_token_id) == ((None, 2) if alone else (0, 0))
        for side in ("left", "right"):
            batch = exported.pad({"input_ids": documents}, padding_side=side, return_tensors="pt")
            assert len({len(d) for d in documents}) > 1
            if alone:
                with pytest.raises(ValueError, match="no padding token is defined"):
                    scores(**batch)
            else:
                assert torch.allclose(scores(**batch).logits[:, 0], want[bounds], atol=1e-5)


def test_another_dtype_on_request(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    merge(trained[1], tmp_path / "out", dtype="bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    with trained[0].named_weights() as stream:
        assert all(torch.equal(stored[name], value.bfloat16()) for name, value in stream)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16


def test_adapters_of_a_16_bit_base_are_folded_in_its_format(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    precision = PrecisionConfig(params="bfloat16", compute="bfloat16", reduce="float32")
    with contextlib.closing(build(folder, model=LORA, precision=precision)) as engine:
        steps(engine, 2)
        saved = engine.save_checkpoint(tmp_path / "c", 2)
        export_hf(engine, tmp_path / "export")
    merge(saved, tmp_path / "out")
    assert compare(tmp_path / "export", tmp_path / "out").same
    assert {v.dtype for v in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_the_generation_settings_of_the_model_are_kept(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    """Above all the tokens at which it stops, which its config.json may not list."""
    merge(trained[1], tmp_path / "out")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.eos_token_id == [2, 7]
    assert loaded.config.eos_token_id == 2
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == GENERATION


def test_a_run_is_merged_by_its_folder_and_replaces_an_older_export(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    steps(trained[0], 1)
    trained[0].save_checkpoint(tmp_path / "c", 2)
    out = tmp_path / "out"
    for _ in range(2):
        plan = merge(tmp_path / "c", out)
        assert plan.origin.endswith("step-00000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "model", "out"]
    with trained[0].named_weights() as stream:
        stored = load_file(out / "model.safetensors")
        assert all(torch.equal(stored[name], value) for name, value in stream)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    saved, out = trained[1], tmp_path / "out"
    for bad, message in (
        ({"dtype": "int4"}, "dtype=int4; it must be one of float32"),
        ({"adapters": "only"}, "has no adapters: it was trained without LoRA"),
        ({"base": "x"}, "has no adapters to merge into the base model x"),
        ({"adapters": "both"}, "adapters=both; it must be merged or only"),
        ({"adapters": "folded"}, "folded is called merged now"),
    ):
        with pytest.raises(CheckpointError, match=message):
            merge(saved, out, **bad)  # type: ignore[arg-type]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "config.json").write_text("{}")
    shutil.copytree(tmp_path / "model", tmp_path / "noted")
    merge(saved, tmp_path / "exported")
    (tmp_path / "exported" / "notes").mkdir()
    # A folder with a config, a model of others, an export that somebody has put something into; a file; a URL.
    for name in ("thesis", "model", "noted", "exported"):
        held = sorted(p.name for p in (tmp_path / name).iterdir())
        with pytest.raises(CheckpointError, match="would be lost"):
            merge(saved, tmp_path / name)
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == held
        if name != "model":
            shutil.rmtree(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a file; choose a folder"):
        merge(saved, tmp_path / "model" / "config.json")
    with pytest.raises(CheckpointError, match="is a URL"):
        merge(saved, "memory://x/y")
    (tmp_path / "thesis").mkdir()
    flip(Path(saved) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        merge(saved, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "model", "thesis"]
    # At one's own risk.
    merge(saved, out, verify=False)


def test_a_base_that_is_another_model_is_refused(tmp_path: Path, process_group: None) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    with contextlib.closing(build(folder, model=LORA)) as engine:
        saved = engine.save_checkpoint(tmp_path / "c", 1)
    other = save_tiny_model(tmp_path / "other", "llama", seed=1)
    with pytest.raises(CheckpointError, match=r"other is not the model that .* was trained from"):
        merge(saved, tmp_path / "out", base=other)
    shutil.move(folder, tmp_path / "moved")
    with pytest.raises(
        CheckpointError, match=r"the base model of .* is not a local folder and cannot be downloaded; set base"
    ):
        merge(saved, tmp_path / "out")
    merge(saved, tmp_path / "out", base=tmp_path / "moved")
    with pytest.raises(CheckpointError, match="would be lost"):
        merge(saved, tmp_path / "moved", base=tmp_path / "moved")
    small = save_tiny_model(tmp_path / "small", "llama", hidden_size=32, head_dim=8)
    manifest = Path(saved) / "manifest.json"
    text = manifest.read_text()
    from drivetrain.engine.checkpoint.manifest import write_manifest
    from drivetrain.engine.checkpoint.storage import LocalStore

    write_manifest(LocalStore(Path(saved)), {**json.loads(text), "fingerprint": "org/name"})
    with pytest.raises(CheckpointError, match="but its adapter factors have"):
        merge(saved, tmp_path / "out", base=small)


def test_verify_finds_what_differs(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    saved = trained[1]
    assert verify(saved).tensors == 3 * 21
    a, b = tmp_path / "a", tmp_path / "b"
    merge(saved, a)
    merge(saved, b, shard_bytes=100_000)
    assert compare(a, b).same
    assert compare(saved, a).same
    tensors = load_file(a / "model.safetensors")
    tensors["model.norm.weight"][3] += 0.5
    tensors["more"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, a / "model.safetensors", {"format": "pt"})
    result = compare(a, b)
    assert result.only_first == ["more"]
    assert result.only_second == ["model.embed_tokens.weight"]
    assert result.different.keys() == {"lm_head.weight", "model.norm.weight"}
    assert "1 of 64 elements, largest difference 0.5" in result.different["model.norm.weight"]
    assert "BF16 and F32" in result.different["lm_head.weight"]
    assert result.largest == pytest.approx(0.5)
    assert len(result.equal) == 21 - 3
    flip(Path(saved) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        verify(saved)


def test_two_checkpoints_are_compared_with_their_moments(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    engine, saved = trained
    optimizer: Any = engine._optimizer  # type: ignore[attr-defined]
    name = next(iter(optimizer._views))
    optimizer.moments(name)["exp_avg"].view(-1)[0] += 1
    other = engine.save_checkpoint(tmp_path / "other", 1)
    result = compare(saved, other)
    assert len(result.different) == 1
    assert next(iter(result.different)).endswith(" (exp_avg)")
    assert len(result.equal) == 3 * 21 - 1


def test_inspect_says_what_it_is(trained: tuple[BaseEngine, str], tmp_path: Path) -> None:
    found = inspect(tmp_path / "c")
    assert (found.step, found.backend, found.processes, found.optimizer) == (1, "fsdp", 1, "adamw")
    assert found.parameters == 110912
    assert found.dtypes == {kind: {"F32": 21} for kind in ("value", "exp_avg", "exp_avg_sq")}
    assert found.model["architecture"] == "LlamaForCausalLM"
    trained[0].save_checkpoint(tmp_path / "c", 2)
    (tmp_path / "c" / "step-00000002" / "manifest.json").unlink()
    assert "has no manifest.json" in (inspect(tmp_path / "c").also or {})["step-00000002"]
    assert inspect(tmp_path / "model").kind == "hugging_face"
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        inspect(tmp_path / "c" / "step-00000002")


def test_the_commands(trained: tuple[BaseEngine, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, out = trained[1], str(tmp_path / "out")
    assert main("merge", [saved, out, "--dry-run", "--shard-size", "100KB"]) == 0
    printed = capsys.readouterr().out
    assert "model-00001-of-0000" in printed
    assert "nothing was written" in printed
    assert not Path(out).exists()
    assert main("merge", [saved, out]) == 0
    assert "replaces" not in capsys.readouterr().out
    assert main("merge", [saved, out]) == 0
    assert "replaces the earlier export in this folder" in capsys.readouterr().out
    assert main("verify", [saved]) == 0
    assert "all checksums match" in capsys.readouterr().out
    assert main("verify", [saved, out]) == 0
    assert "equal: 21 tensors, byte for byte" in capsys.readouterr().out
    assert main("verify", [str(tmp_path / "model"), out]) == 3
    assert "different: 0 tensors equal, 21 different" in capsys.readouterr().out
    assert main("inspect", [saved, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert main("inspect", [str(tmp_path / "nowhere")]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error(trained: tuple[BaseEngine, str], capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGPIPE)
    assert main("inspect", [trained[1]]) == 0
    # It would end a process that has sockets, which tests and programs of others do.
    assert signal.getsignal(signal.SIGPIPE) == before
    words = [sys.executable, "-m", "drivetrain.cli", "inspect", trained[1]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert (command.stderr.read(), command.wait(60)) == ("", 0)


def test_looking_at_a_checkpoint_loads_no_torch(trained: tuple[BaseEngine, str]) -> None:
    code = (
        "import sys; from drivetrain.cli import main; "
        f"assert main(['inspect', {trained[1]!r}]) == 0; assert main(['verify', {trained[1]!r}]) == 0; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("size", ["1.2.3GB", ".GB", "0GB", "5", "GB"])
def test_what_is_not_a_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("merge", ["a", "b", "--shard-size", size])
    assert f"argument --shard-size: {size!r} is not a size; write it like 5GB or 500MiB" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "count"), [("1.5GB", 1_500_000_000), (".5k", 500), ("2.MiB", 2**21), ("3t", 3 * 10**12)])
def test_sizes(size: str, count: int) -> None:
    assert _size(size) == count
