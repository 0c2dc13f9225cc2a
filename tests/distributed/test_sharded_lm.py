"""Models that are split over ranks: plain transformers' logits, whatever the number of ranks, chunks, families and images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import CapabilityError, ConfigError, ModelError
from drivetrain.workers.tensor_parallel.model import ShardedLM, parse_config
from drivetrain.workers.tensor_parallel.styles import bounds, gather_last, sum_over
from drivetrain.workers.tensor_parallel.vision import ImageReader, decode_images, step_with_images
from helpers.harness import run_ranks
from helpers.vision import IMAGE, image_uri, prompt_with, save_vision_model

FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "deepseek_v3"]
MORE_FAMILIES = ["gemma2", "qwen2", "qwen3_moe", "phi3", "olmo2", "gpt_neox", "mistral"]
TOLERANCE = 5e-6
PROMPT = [(7 * i + 3) % 250 for i in range(21)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    for family in FAMILIES:
        save_tiny_model(root / family, family)
    save_tiny_model(root / "tied", "qwen3", tie_word_embeddings=True)
    # A vocabulary that no number of ranks divides, in several files.
    save_tiny_model(root / "odd", "qwen3", vocab_size=251, shard_size="60KB")
    return root


def load(folder: Path, **more: Any) -> ShardedLM:
    config = parse_config((folder / "config.json").read_text())
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    return ShardedLM(config, sorted(folder.glob("*.safetensors")), torch.device("cpu"), group, **more)


def check_family(folder: Path) -> float:
    """Compare steps of a model with plain transformers; return this rank's share of the parameters."""
    lm = load(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def check(logits: torch.Tensor, ids: list[int]) -> None:
        with torch.no_grad():
            expected = plain(torch.tensor([ids])).logits[0, -1]
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) <= TOLERANCE, folder.name
        # Sampling on one rank is sampling on all.
        gathered = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, logits.contiguous())
        assert all(torch.equal(other, logits) for other in gathered)

    logits = torch.empty(0)
    for chunks in ([21], [7, 7, 7], [1, 20]):
        offset = 0
        for size in chunks:
            logits = lm.step(PROMPT[offset : offset + size], offset)
            offset += size
        check(logits, PROMPT)
    ids = list(PROMPT)
    for _ in range(5):
        ids.append(int(logits.argmax()))
        logits = lm.step(ids[-1:], len(ids) - 1)
    check(logits, ids)
    # Back to the middle of the prompt, and to its beginning.
    check(lm.step([5, 6], 10), [*PROMPT[:10], 5, 6])
    assert lm.length == 12
    check(lm.step([9], 0), [9])
    total = sum(parameter.numel() for parameter in plain.parameters())
    share = sum(parameter.numel() for parameter in lm.model.parameters()) / total
    lm.close()
    return share


def all_families(root: str, names: list[str]) -> dict[str, float]:
    return {name: check_family(Path(root) / name) for name in names}


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_those_of_plain_transformers(models: Path, size: int) -> None:
    shares = run_ranks(all_families, size, str(models), [*FAMILIES, "tied", "odd"])
    for own in shares:
        # Latent attention is not split by transformers' plan.
        most = {name: 1 / size + (0.35 * (1 - 1 / size) if name == "deepseek_v3" else 0.01) for name in own}
        assert all(share <= most[name] for name, share in own.items()), own
    if size == 4:
        # Fewer heads of keys and values than ranks: every rank computes all heads, from a part of the weights.
        assert shares[0]["qwen3"] < 0.27


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_steps_of_more_families(tmp_path: Path, size: int) -> None:
    for family in MORE_FAMILIES:
        save_tiny_model(tmp_path / family, family)
    run_ranks(all_families, size, str(tmp_path), MORE_FAMILIES)


def with_images(root: str, family: str) -> None:
    folder = Path(root) / family
    lm, reader = load(folder), ImageReader(folder)
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    for images in ([image_uri(1, 84, 56)], [image_uri(1, 84, 56), image_uri(2, 56, 112)]):
        pixels = reader.read(images)
        ids = reader.expand(prompt_with(len(images)), IMAGE, pixels.tokens)
        tensor = torch.tensor([ids])
        expected = plain.generate(
            input_ids=tensor,
            attention_mask=torch.ones_like(tensor),
            pixel_values=pixels.values,
            image_grid_thw=pixels.grids,
            mm_token_type_ids=(tensor == IMAGE).int(),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for chunk in (7, 16, 1000):
            logits = step_with_images(lm, ids, 0, IMAGE, pixels, chunk)
            for step, reference in enumerate(expected.logits):
                assert float((logits - reference[0]).abs().max()) <= TOLERANCE
                token = int(expected.sequences[0, len(ids) + step])
                assert int(logits.argmax()) == token
                logits = lm.step([token], len(ids) + step)
        # Back to before the images, and not into them.
        with torch.no_grad():
            text = plain(torch.tensor([[*ids[:2], 9, 10]])).logits[0, -1]
        with pytest.raises(ConfigError, match=f"offset=3 is inside of a prompt with images, from 0 to {len(ids)}"):
            lm.step([9, 10], 3)
        assert float((lm.step([*ids[:2], 9, 10], 0) - text).abs().max()) <= TOLERANCE
        # After a prompt of text, images; then back to the text.
        lm.step(PROMPT, 0)
        step_with_images(lm, ids, len(PROMPT), IMAGE, pixels, 16)
        lm.step([5], len(PROMPT) + len(ids))
        with torch.no_grad():
            text = plain(torch.tensor([[*PROMPT[:20], 9]])).logits[0, -1]
        assert float((lm.step([9], 20) - text).abs().max()) <= TOLERANCE
        # The positions of images are those of one sequence: the next one has none.
        with torch.no_grad():
            text = plain(torch.tensor([PROMPT])).logits[0, -1]
        assert float((lm.step(PROMPT, 0) - text).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_images_are_those_of_plain_transformers(tmp_path: Path, family: str, size: int) -> None:
    save_vision_model(tmp_path / family, family)
    run_ranks(with_images, size, str(tmp_path), family)


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    for width in (1, 2, 3, 8, 100_000):
        whole = torch.arange(2 * width, dtype=torch.float32).view(2, width)
        low, high = bounds(width, size, rank)
        assert torch.equal(gather_last(whole[:, low:high], width, group, rank, size), whole)
        assert torch.equal(sum_over(whole * (rank + 1), group), whole * sum(range(size + 1)))
    assert [bounds(7, 3, part) for part in range(3)] == [(0, 2), (2, 4), (4, 7)]


def test_what_ranks_exchange_whatever_its_size() -> None:
    run_ranks(collectives, 2)


def test_what_a_family_keeps_in_float32_is_kept(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    lm = load(folder)
    expected = {name: tensor.dtype for name, tensor in plain.state_dict().items()}
    assert set(expected.values()) == {torch.bfloat16, torch.float32}
    assert {name: tensor.dtype for name, tensor in lm.model.state_dict().items()} == expected
    for name, tensor in plain.state_dict().items():
        if expected[name] == torch.float32:
            assert torch.equal(tensor, lm.model.state_dict()[name])
    lm.close()


def refusals(root: str) -> None:
    for family in ("gpt2", "gpt_oss"):
        with pytest.raises(CapabilityError, match=f"transformers has no plan by which the layers of {family} could be split"):
            load(Path(root) / family)


def test_families_without_a_plan_are_refused(tmp_path: Path) -> None:
    for family in ("gpt2", "gpt_oss"):
        save_tiny_model(tmp_path / family, family)
    run_ranks(refusals, 2, str(tmp_path))
    # Alone, a rank needs no plan.
    assert run_ranks(all_families, 1, str(tmp_path), ["gpt2", "gpt_oss"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ConfigError, "config_json is not JSON"),
        ("[]", ConfigError, "config_json has no model_type"),
        ('{"model_type": "no_such"}', CapabilityError, "model_type=no_such is not supported"),
        ('{"model_type": "llama"}', ModelError, "0 safetensors files"),
        ('{"model_type": "bert"}', CapabilityError, "bert cannot be run in generation steps: it is not a decoder"),
        ('{"model_type": "mamba"}', CapabilityError, "mamba cannot be run in generation steps"),
        ('{"model_type": "qwen3_next"}', CapabilityError, "qwen3_next cannot be run .*: its layers are linear_attention"),
        ('{"model_type": "t5"}', CapabilityError, "t5 is not a language model"),
        ('{"model_type": "llama", "hidden_size": "x"}', ConfigError, "config_json cannot be used"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}', CapabilityError, "the model is quantized"),
        ('{"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}', CapabilityError, "the model's code is in its folder"),
    ],
)
def test_configurations_that_cannot_be_run_are_named(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ShardedLM(parse_config(text), [], torch.device("cpu"))


@pytest.mark.parametrize("quant", ["q5k", "", "INT8"])
def test_another_quantization_is_refused(models: Path, quant: str) -> None:
    with pytest.raises(
        ModelError, match=f"quant='{quant}': there is no such quantization here; there is int8, or null for none"
    ):
        load(models / "llama", quant=quant)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "https://example.org/a.png",
            "image 0: https://example.org/a.png is a URL; only data URIs and bytes are accepted here",
        ),
        ("file:///etc/passwd", "only data URIs and bytes are accepted here"),
        ("data:text/html;base64,AAAA", r"the image \(data URI\) is not an image of a known format"),
        ("data:image/png;base64,!!", "image 0: the data URI of the image is not base64"),
        ("data:image/png;base64,AAAA", r"image 0: the image \(data URI\) is not an image of a known format"),
        ("", "only data URIs and bytes are accepted here"),
    ],
)
def test_images_that_cannot_be_decoded_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_images([uri])


def test_an_image_that_claims_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.media.decode.MOST_PIXELS", 100)
    with pytest.raises(ConfigError, match=r"image 0: the image \(data URI\) has 20 x 30 pixels; at most 100 are decoded"):
        decode_images([image_uri(1, 20, 30)])
