"""Rows with images, video and audio: their tokens, their fields, the store, and what cannot be used."""

import importlib
import io
import json
import logging
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from drivetrain.engine.config import ModelConfig
from drivetrain.engine.errors import BatchError, ConfigError, DataError, MediaError, ModelError
from drivetrain.engine.hf.media import FAMILIES
from drivetrain.engine.hf.tokenizer import load_tokenizer
from drivetrain.engine.packing.batch import Kind, PackedBatch, joined_rows
from drivetrain.engine.packing.microbatch import balance
from drivetrain.engine.tiny_media import AUDIO, IMAGE, VIDEO
from drivetrain.media import decode, processors
from drivetrain.media.decode import (
    MediaLimits,
    TooLarge,
    TooLargeError,
    decode_audio,
    decode_image,
    decode_video,
    frame_indices,
)
from drivetrain.media.sources import OVER_NETWORK, Access, MediaSource, read_source
from drivetrain.trainers.config.data import DataConfig, PromptsConfig
from drivetrain.trainers.data.dataset import Budget, TokenDataset
from drivetrain.trainers.data.encode import DataKind, encode_row
from drivetrain.trainers.data.files import Chunk
from drivetrain.trainers.data.loader import GlobalBatch, Loader
from drivetrain.trainers.data.media import MediaReader, fields_of
from drivetrain.trainers.data.order import Sampler
from drivetrain.trainers.data.prompts import encode_prompt
from drivetrain.trainers.data.sample import Sample
from drivetrain.trainers.data.sources import DataSource
from drivetrain.trainers.data.tokenize import Encoder, load_token_caches
from drivetrain.trainers.data_show.facts import Facts
from drivetrain.trainers.methods.preference import mismatched
from helpers.media import MARKED, data_uri, movie, picture, png, save_processors, tone, wav

ANSWER = {"role": "assistant", "content": "3 red"}
KINDS: dict[Kind, tuple[bytes, int]] = {"image": (png(40, 24), IMAGE), "video": (movie(30), VIDEO), "audio": (wav(1.0), AUDIO)}
"""An item of each kind, and the token in whose place its features stand."""
BUDGET = Budget(tokens=10_000, setting="engine.micro_batch.max_tokens=10000")


def reader_of(folder: Path, family: str = "qwen2_5_vl", template: str | None = None, **data: Any) -> MediaReader:
    save_processors(folder / family, family, **({} if template is None else {"template": template}))
    model = ModelConfig(path=str(folder / family))
    config = DataConfig(cache_dir=str(folder / "cache"), **data)
    reader = MediaReader.of(model, config, load_tokenizer(model), folder / "cache")
    assert reader is not None
    return reader


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MediaReader:
    return reader_of(tmp_path_factory.mktemp("qwen"))


def encoded(reader: MediaReader, row: Mapping[str, Any], kind: DataKind = "completions", **data: Any) -> list[Sample]:
    return encode_row(reader.tokenizer, row, "rows.jsonl:4", DataConfig(**data), kind, None, reader)


def question(*parts: Any, text: str = "how many") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}, ANSWER]


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


# ---- tokens and fields against transformers' own processors --------------------------------------------------------------


def test_every_family_of_the_engine_has_a_processor() -> None:
    assert set(processors.PROCESSORS) == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_and_fields_fit_each_other(family: str, tmp_path: Path) -> None:
    """For all items of a chat at once: the engine's own check of a batch passes, and equal content is stored once."""
    reader = reader_of(tmp_path, family)
    for kind in reader.processor.family.modalities:
        content, token = KINDS[kind]
        part = {"type": kind, kind: {"bytes": content, "path": None}}
        (sample,) = encoded(reader, {"messages": question(part, part)})
        first, second = sample.media
        assert first.key == second.key
        places = [i for i, one in enumerate(sample.ids) if one == token]
        # A span may have other tokens between those of tiles.
        assert [i for i in places if first.first <= i < first.last] + [i for i in places if i >= second.first] == places
        assert sample.ids[first.first] == sample.ids[first.last - 1] == token
        fields = {name: field.values for name, field in fields_of([sample], reader.store).items()}
        assert sum(reader.processor.family.features_of(kind, fields)) == len(places)
        assert reader.processor.family.problem(kind, fields) is None
        learned = "".join(reader.tokenizer.decode(i) for i, s in zip(sample.ids, sample.supervised, strict=True) if s)
        # Of a folder of Qwen3.5, transformers takes its own class, which leaves out the spaces of a tokenizer of single characters.
        assert learned == ("3red<end>" if family.startswith("qwen3_5") else "3 red<end>")


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen2_audio"])
def test_a_chat_is_what_the_family_s_processor_makes_of_it(family: str, tmp_path: Path) -> None:
    """Of the families whose processor needs no torchvision: the ids, and all fields to the bit."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    classes: dict[str, tuple[str, dict[str, Any]]] = {
        "gemma3": ("gemma3.processing_gemma3.Gemma3Processor", {"image_seq_length": 4}),
        "idefics3": ("idefics3.processing_idefics3.Idefics3Processor", {"image_seq_len": 4}),
        "qwen2_audio": ("qwen2_audio.processing_qwen2_audio.Qwen2AudioProcessor", {"chat_template": "x"}),
    }
    name, needs = classes[family]
    reader = reader_of(tmp_path, family)
    tokenizer, folder = reader.tokenizer, tmp_path / family
    if family == "gemma3":
        for role, token in (("image", "<image_soft_token>"), ("boi", "<start_of_image>"), ("eoi", "<end_of_image>")):
            setattr(tokenizer, f"{role}_token", token)
            setattr(tokenizer, f"{role}_token_id", tokenizer.convert_tokens_to_ids(token))
    module, _, cls = f"transformers.models.{name}".rpartition(".")
    audio = family == "qwen2_audio"
    part = AutoFeatureExtractor.from_pretrained(folder) if audio else AutoImageProcessor.from_pretrained(folder, backend="pil")
    theirs = getattr(importlib.import_module(module), cls)(part, tokenizer, **needs)
    kind: Kind = "audio" if audio else "image"
    items: list[Any] = [tone(1.0, 2000), tone(0.5, 2000)] if audio else [picture(40, 24, 1), picture(16, 50, 2)]
    values = [{"array": item, "sampling_rate": 2000} for item in items] if audio else items
    chat = question(*({"type": kind, kind: value} for value in values))
    (sample,) = encoded(reader, {"messages": chat})
    text = tokenizer.apply_chat_template(question(*({"type": kind} for _ in values)), tokenize=False)
    given_items = {"audio": items, "sampling_rate": 2000} if audio else {"images": [items]}
    want = theirs(text=[text], return_tensors="pt", **given_items)
    assert sample.ids == want["input_ids"][0].tolist()
    for field, value in fields_of([sample], reader.store).items():
        assert torch.equal(value.values, want[field].flatten(0, 1) if family == "idefics3" else want[field]), field


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_gemma4_is_what_its_processor_makes_of_it(kind: Kind, tmp_path: Path) -> None:
    """Its video processor needs torchvision: of a video, what the image processor makes of each frame."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    reader = reader_of(tmp_path, "gemma4")
    folder, tokenizer = tmp_path / "gemma4", reader.tokenizer
    names = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "audio": "<|AUDIO|>"}
    names |= {"boa": "<|audio_bos|>", "eoa": "<|audio_eos|>"}
    for role, token in names.items():
        setattr(tokenizer, f"{role}_token", token)
        setattr(tokenizer, f"{role}_token_id", tokenizer.convert_tokens_to_ids(token))
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    theirs: Any = object.__new__(Gemma4Processor)
    for name in ("image", "boi", "eoi", "audio", "boa", "eoa"):
        setattr(theirs, f"{name}_token", names[name])
    theirs.video_token = "<|video_pad|>"
    limits = MediaLimits(max_frames=7, fps=0.1)
    if kind == "image":
        want = [dict(images(item, return_tensors="pt")) for item in (picture(40, 24, 1), picture(16, 50, 2))]
        values: list[Any] = [png(40, 24, 1), png(16, 50, 2)]
        texts = [theirs.replace_image_token(one, 0) for one in want]
    elif kind == "audio":
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        tones = [tone(1.0, 2000), tone(0.49, 2000)]
        want = [dict(extractor([item], return_tensors="pt")) for item in tones]
        values = [{"array": item, "sampling_rate": 2000} for item in tones]
        texts = [theirs.replace_audio_token(one, 0) for one in want]
    else:
        values = [movie(700, width=60, height=32)]
        video = decode_video(MediaSource(kind="video", name="x", content=values[0]), limits, 1)
        frames = [dict(images(frame, return_tensors="pt", max_soft_tokens=70)) for frame in video.frames]
        fields = {"pixel_values": "pixel_values_videos", "image_position_ids": "video_position_ids"}
        want = [{new: torch.cat([one[old] for one in frames]) for old, new in fields.items()}]
        metadata = SimpleNamespace(fps=0.1, timestamps=video.seconds)
        inputs = {"num_soft_tokens_per_video": frames[0]["num_soft_tokens_per_image"], "video_metadata": [metadata]}
        texts = [theirs.replace_video_token(inputs, 0)]
        assert "00:50 <|image>" in texts[0]
        assert "01:00 <|image>" in texts[0]
    for value, one, text in zip(values, want, texts, strict=True):
        media = reader.processor.process(read_source(kind, value, Access()), limits)
        assert media.text == text
        for field, tensor in media.fields.items():
            theirs_of = one[field][:, : tensor.shape[1]]
            assert torch.equal(tensor, theirs_of.to(tensor.dtype)), field
            # What is left out is padding.
            assert not one[field][:, tensor.shape[1] :].any()


def test_a_limit_on_pixels_is_one_on_features_of_gemma4(tmp_path: Path) -> None:
    """Its processor scales images up to its budget."""
    reader = reader_of(tmp_path, "gemma4")
    reader.processor._images.max_soft_tokens = 280
    source = MediaSource(kind="image", name="x", content=png(400, 400))
    # A feature is of 8 x 8 pixels.
    for most, budget in ((None, 280), (64 * 1000, 280), (64 * 280, 280), (64 * 279, 140), (64, 70)):
        media = reader.processor.process(source, MediaLimits(max_pixels=most))
        assert media.fields["pixel_values"].shape[1] == budget * 4
        assert 0.8 * budget < media.tokens <= budget


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_5_vl", "qwen2_5_vl.processing_qwen2_5_vl.Qwen2_5_VLProcessor"),
        ("qwen3_vl", "qwen3_vl.processing_qwen3_vl.Qwen3VLProcessor"),
        ("smolvlm", "smolvlm.processing_smolvlm.SmolVLMProcessor"),
        ("internvl", "internvl.processing_internvl.InternVLProcessor"),
    ],
)
def test_what_stands_for_an_image_is_what_the_family_s_processor_writes(family: str, name: str, tmp_path: Path) -> None:
    """Of the families whose processor cannot be built without torchvision: its own method, on what it reads."""
    reader = reader_of(tmp_path, family)
    module, _, cls = f"transformers.models.{name}".rpartition(".")
    processor, images = reader.processor, reader.processor._images
    media = processor.process(MediaSource(kind="image", name="x", content=png(40, 24)), MediaLimits())
    options = (
        {"return_row_col_info": True} if family == "smolvlm" else {"crop_to_patches": True} if family == "internvl" else {}
    )
    outputs = images(picture(40, 24), return_tensors="pt", **options)
    stand_in = SimpleNamespace(
        image_processor=images,
        image_token=processor.token("image"),
        image_seq_len=4,
        image_seq_length=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        start_image_token="<img>",
        end_image_token="</img>",
    )
    theirs = getattr(importlib.import_module(module), cls).replace_image_token(stand_in, outputs, image_idx=0)
    assert media.text == theirs


def published_video_patches(frames: NDArray[Any], patch: int, merge: int, merged: int) -> NDArray[Any]:
    """The order of patches of Qwen's video processors, as its view and permutation of transformers 5.23 give it."""
    count, channels, height, width = frames.shape
    high, wide = height // patch, width // patch
    shape = (count // merged, merged, channels, high // merge, merge, patch, wide // merge, merge, patch)
    return frames.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * merged * patch * patch)


def test_patches_of_a_video_are_those_of_the_published_formula(qwen: MediaReader) -> None:
    source = MediaSource(kind="video", name="x", content=movie(30, width=64, height=32))
    media = qwen.processor.process(source, MediaLimits(max_frames=5))
    # Three frames would be rounded to a multiple of two.
    frames = decode_video(source, MediaLimits(max_frames=5), 2).frames
    assert len(frames) == 4
    # At most 512 pixels: 32 x 64 becomes 16 x 32, by the formula tested below.
    resized = [
        np.asarray(frame.resize((32, 16), Image.Resampling.BICUBIC), np.float32).transpose(2, 0, 1) / 255 for frame in frames
    ]
    mean, std = (
        np.array(getattr(qwen.processor._images, f"image_{name}"), np.float32)[:, None, None] for name in ("mean", "std")
    )
    want = published_video_patches((np.stack(resized) - mean) / std, 4, 2, 2)
    assert media.fields["video_grid_thw"].tolist() == [[2, 4, 8]]
    assert media.tokens == 2 * 4 * 8 // 4
    torch.testing.assert_close(media.fields["pixel_values_videos"], torch.from_numpy(want), rtol=1e-5, atol=1e-5)
    # Frames of two patches in time differ, so an order of time alone would not pass.
    assert not torch.allclose(media.fields["pixel_values_videos"][:32], media.fields["pixel_values_videos"][32:])
    assert media.fields["second_per_grid_ts"].tolist() == pytest.approx([2 / (4 / 3)])


def published_size_of_qwen3(
    frames: int, height: int, width: int, factor: int, least: int, most: int, merged: int
) -> tuple[int, int]:
    """`smart_resize` of Qwen3-VL's video processor, written down again: its module needs torchvision."""
    h, w, t = (round(side / part) * part for side, part in ((height, factor), (width, factor), (frames, merged)))
    if t * h * w > most:
        beta = (frames * height * width / most) ** 0.5
        return max(factor, int(height / beta / factor) * factor), max(factor, int(width / beta / factor) * factor)
    if t * h * w < least:
        beta = (least / (frames * height * width)) ** 0.5
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return h, w


@given(st.integers(2, 60), st.integers(28, 3000), st.integers(28, 3000))
@settings(max_examples=200, deadline=None)
def test_sizes_are_those_of_the_published_formulas(frames: int, height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    least, most = 56 * 56, 28 * 28 * 1280
    assert processors.smart_size(1, height, width, 28, least, most) == smart_resize(height, width, 28, least, most)
    assert processors.smart_size(frames, height, width, 28, least, most, 2) == published_size_of_qwen3(
        frames, height, width, 28, least, most, 2
    )


def test_a_video_of_qwen3_has_the_seconds_of_each_patch(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, "qwen3_vl")
    part = {"type": "video", "video": movie(30)}
    (sample,) = encoded(reader, {"messages": question(part)})
    text = reader.tokenizer.decode(sample.ids)
    # Six frames at 0, 0.5, ..., 2.5 seconds, two in a patch.
    assert [word in text for word in ("<0.2 seconds>", "<1.2 seconds>", "<2.2 seconds>")] == [True] * 3
    # Each with borders of its own, instead of those that the template writes around the whole.
    assert text.count("<|vision_start|>") == text.count("<|vision_end|>") == 3


@given(st.floats(0.01, 5000), st.integers(1, 100_000), st.integers(1, 100), st.floats(0.1, 30), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_frames_are_spread_over_the_video(seconds: float, count: int, most: int, fps: float, multiple: int) -> None:
    chosen = frame_indices(seconds, count, MediaLimits(max_frames=most, fps=fps), multiple)
    assert 1 <= len(chosen) <= min(most, count)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert chosen[-1] < count
    assert len(chosen) % multiple == 0 or min(most, count) < multiple
    gaps = np.diff([*chosen, count])
    assert gaps.max() - gaps.min() <= 1


# ---- forms of rows -------------------------------------------------------------------------------------------------------


def test_all_ways_to_give_an_image_give_the_same_sample(qwen: MediaReader, tmp_path: Path) -> None:
    content = png(24, 16)
    (tmp_path / "a b.png").write_bytes(content)
    reader = MediaReader(
        processor=qwen.processor, tokenizer=qwen.tokenizer, store=qwen.store, limits=qwen.limits, folder=tmp_path
    )
    values: Sequence[Any] = (
        "a b.png",
        str(tmp_path / "a b.png"),
        f"file://{tmp_path}/a b.png",
        tmp_path / "a b.png",
        content,
        {"bytes": content, "path": None},
        {"bytes": None, "path": "a b.png"},
        data_uri(content),
    )
    parts = [
        *(image(value) for value in values),
        {"type": "image", "path": "a b.png"},
        {"type": "image", "url": data_uri(content)},
        {"type": "image_url", "image_url": {"url": data_uri(content)}},
        {"type": "image_url", "image_url": data_uri(content)},
    ]
    rows: list[dict[str, Any]] = [{"messages": question(part)} for part in parts]
    text = {"role": "user", "content": "<image>how many"}
    rows += [
        {"messages": question({"type": "image"}), "images": [content]},
        {"messages": question({"type": "image"}), "image": content},
        {"messages": [text, ANSWER], "images": ["a b.png"]},
        {"prompt": [text], "completion": [ANSWER], "images": ["a b.png"]},
        {
            "conversations": [{"from": "human", "value": "<image>how many"}, {"from": "gpt", "value": "3 red"}],
            "images": ["a b.png"],
        },
    ]
    samples = [encoded(reader, row)[0] for row in rows]
    for row, sample in zip(rows, samples, strict=True):
        assert (sample.ids, sample.supervised, sample.media) == (samples[0].ids, samples[0].supervised, samples[0].media), row
    # PIL's picture is written as PNG, so its key may be another one; its pixels are the same.
    (drawn,) = encoded(reader, {"messages": question(image(Image.open(io.BytesIO(content))))})
    assert drawn.ids == samples[0].ids
    assert torch.equal(*(fields_of([s], qwen.store)["pixel_values"].values for s in (drawn, samples[0])))


def test_pairs_unpaired_rows_and_prompts_have_media(qwen: MediaReader) -> None:
    asked = question(image(png()))[:1]
    pair = {"prompt": asked, "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "4"}]}
    chosen, rejected = encoded(qwen, pair, "pairs")
    assert chosen.media == rejected.media != ()
    whole = {"chosen": [*asked, ANSWER], "rejected": [*asked, {"role": "assistant", "content": "4"}]}
    assert [s.ids for s in encoded(qwen, whole, "pairs")] == [chosen.ids, rejected.ids]
    (good,) = encoded(qwen, {"prompt": asked, "completion": [ANSWER], "label": True}, "unpaired")
    assert (good.ids, good.media, good.chosen) == (chosen.ids, chosen.media, True)
    prompt = encode_prompt(qwen.tokenizer, {"prompt": asked, "answer": "3"}, "row", PromptsConfig(), qwen)
    assert prompt.ids == list(chosen.ids[: len(prompt.ids)])
    assert prompt.media == chosen.media
    assert prompt.columns == {"answer": "3"}
    assert "media" not in str(prompt.content)
    marked = [{"role": "user", "content": "<image>?"}]
    columns = encode_prompt(qwen.tokenizer, {"prompt": marked, "images": [png()]}, "row", PromptsConfig(), qwen)
    assert columns.media[0].key == chosen.media[0].key
    assert columns.columns == {}


def test_the_turns_of_a_chat_have_the_media_before_them(qwen: MediaReader, tmp_path: Path) -> None:
    chat = [*question(image(png(24, 16))), *question(image(png(48, 32, 1)), image(png(24, 16)))]
    (whole,) = encoded(qwen, {"messages": chat})
    first, last = encoded(qwen, {"messages": chat}, turns="per_turn")
    assert [len(s.media) for s in (whole, first, last)] == [3, 1, 3]
    assert whole.media == last.media
    assert whole.media[0].key == whole.media[2].key != whole.media[1].key
    assert first.media == whole.media[:1]
    # With a template that marks what is generated, the same tokens are learned.
    marked = reader_of(tmp_path, "qwen2_5_vl", MARKED)
    (other,) = encoded(marked, {"messages": chat})
    assert (other.ids, other.supervised) == (whole.ids, whole.supervised)
    assert [span.first for span in other.media] == [span.first for span in whole.media]


def test_a_template_that_takes_lists_alone_gets_them(tmp_path: Path) -> None:
    lists = "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    chat, text = question(image(png())), [{"role": "user", "content": "hello"}, ANSWER]
    both = [reader_of(tmp_path / str(i), "qwen2_5_vl", template) for i, template in enumerate((lists, None))]
    assert [reader.lists_content for reader in both] == [True, False]
    for row in (chat, text):
        ids = [encoded(reader, {"messages": row})[0].ids for reader in both]
        assert ids[0] == ids[1]


# ---- what cannot be used -------------------------------------------------------------------------------------------------

BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": question(image("missing.png"))},
        "message 1: the image 'missing.png' cannot be read (No such file or directory)",
    ),
    ({"messages": question(image("."))}, "message 1: the image '.' is not a file"),
    ({"messages": question(image("/dev/zero"))}, "is not a file: /dev/zero"),
    ({"messages": question(image("a\0b"))}, "cannot be read (embedded null byte)"),
    ({"messages": question(image(b"no picture"))}, "message 1: the image (bytes) is not an image of a known format"),
    ({"messages": question(image(png()[:120]))}, "the image (bytes) cannot be decoded"),
    ({"messages": question(image(b""))}, "the image (bytes) is empty"),
    ({"messages": question(image(data_uri(b"")))}, "the image (data URI) is empty"),
    ({"messages": question(image("data:image/png,abc"))}, "give a data URI as data:image/...;base64"),
    ({"messages": question(image("data:image/png;base64,@@"))}, "the data URI of the image is not base64"),
    ({"messages": question(image("https://example.com/a.png"))}, "is a URL; data.allow_url=true fetches it"),
    ({"messages": question(image(7))}, "the image is int; give a path, a data URI or bytes"),
    ({"messages": question(image({"width": 3}))}, "the image is a mapping of width; give bytes or path"),
    (
        {"messages": question({"type": "image"})},
        "message 1 has a placeholder for image, but no image is left for it; give it in the part",
    ),
    (
        {"messages": question({"type": "image"}, {"type": "image"}), "images": [png()]},
        "message 1 has a placeholder for image, but no image is left for it in its column images",
    ),
    ({"messages": question(), "images": [png()]}, "has 1 images in its column images for which there is no placeholder"),
    (
        {"messages": question({"type": "image"}), "images": [png()], "image": png()},
        "has the columns images and image; give one",
    ),
    (
        {"messages": question(image(png()), text="<|image_pad|>")},
        "has 1 images, but its rendered chat contains '<|image_pad|>' 2 times; it must appear once per image",
    ),
    ({"messages": question(text="<|image_pad|>")}, "has 1 tokens '<|image_pad|>', of which its images account for 0"),
    ({"messages": question({"type": "audio", "audio": wav(1)})}, "takes image and video, but no audio"),
    (
        {"messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [image(png())]}]},
        "message 2 has image in a turn of the role 'assistant'",
    ),
    (
        {"messages": [{"role": "system", "content": [image(png())]}, *question()]},
        "message 1 has image in a turn of the role 'system'",
    ),
    (
        {"messages": question({"type": "tool_result"})},
        "has parts of type tool_result, text; the types are text, image, image_url",
    ),
    ({"messages": question({"type": "video", "video": movie(3)[:400]})}, "the video (bytes)"),
    ({"messages": question({"type": "video", "video": wav(1)})}, "the video (bytes) has no video stream"),
    ({"messages": question({"type": "video", "video": b"ffconcat version 1.0\nfile /etc/hostname\n"})}, "cannot be decoded"),
    (
        {"prompt": "how many", "completion": "3", "images": [png()]},
        "has 1 images in its column images for which there is no placeholder",
    ),
    ({"text": "three", "images": [png()]}, "has 1 images in its column images for which there is no placeholder"),
    (
        {"messages": question(image(png(800, 2)))},
        "the image (bytes) cannot be processed: absolute aspect ratio must be smaller than 200, got 400.0",
    ),
]


@pytest.mark.parametrize(("row", "message"), BROKEN, ids=[message[:60] for _, message in BROKEN])
def test_what_cannot_be_used_is_one_line_with_the_row(qwen: MediaReader, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        encoded(qwen, row)
    assert str(caught.value).startswith("rows.jsonl:4")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_a_model_without_media_refuses_them(tmp_path: Path) -> None:
    from drivetrain.trainers.tasks.addition import make_tokenizer, write_model

    write_model(tmp_path, 0)
    assert MediaReader.of(ModelConfig(path=str(tmp_path)), DataConfig(), make_tokenizer(), tmp_path) is None
    marked = [{"role": "user", "content": "<image>how many"}, ANSWER]
    for row in ({"messages": question(image(png()))}, {"messages": marked, "images": [png()]}):
        with pytest.raises(DataError, match="message 1 has a part of type image, but the model takes no media in"):
            encode_row(make_tokenizer(), row, "rows.jsonl:4", DataConfig())
    # A column that no message refers to is not read, like others, and warned of; an empty cell of a table is none.
    chunk = Chunk(
        "rows.csv",
        [
            (1, {"prompt": "1+1=", "completion": "2", "image": "a.png"}),
            (2, {"prompt": "1+1=", "completion": "2", "image": ""}),
        ],
        1.0,
    )
    encoded_rows = Encoder(make_tokenizer(), DataConfig()).chunk(chunk)
    assert len(encoded_rows.lengths) == 2
    assert encoded_rows.odd == {
        "rows.csv:1": "its column image is not used, because the model takes no images, video or audio"
    }


def test_a_folder_without_a_processor_says_so(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    (tmp_path / "qwen2_5_vl" / "preprocessor_config.json").unlink()
    reader.key()
    assert encoded(reader, {"messages": question()})[0].media == ()
    with pytest.raises(ModelError, match=r"has no usable image processor: .*; copy the model's preprocessor_config\.json"):
        encoded(reader, {"messages": question(image(png()))})
    # Settings of another model.
    save_processors(tmp_path / "qwen2_5_vl", "qwen2_5_vl")
    file = tmp_path / "qwen2_5_vl" / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 8}))
    with pytest.raises(ModelError, match="the processor's settings do not fit the model's: pixel_values has the shape"):
        encoded(reader_of_existing(tmp_path), {"messages": question(image(png()))})


def reader_of_existing(folder: Path) -> MediaReader:
    model = ModelConfig(path=str(folder / "qwen2_5_vl"))
    reader = MediaReader.of(model, DataConfig(), load_tokenizer(model), folder / "cache")
    assert reader is not None
    return reader


def test_over_a_network_only_content_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())

    def no_connection(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "create_connection", no_connection)
    values: Sequence[Any] = (
        str(file),
        f"file://{file}",
        file,
        {"path": str(file)},
        "http://127.0.0.1/a.png",
        "https://example.com/a.png",
    )
    for value in values:
        with pytest.raises(MediaError, match="only data URIs and bytes are accepted here"):
            read_source("image", value, OVER_NETWORK)
    assert read_source("image", data_uri(png()), OVER_NETWORK).content == file.read_bytes()
    # Local data may name files; nothing larger than the bound is read, whichever way it comes.
    small = Access(folder=tmp_path, max_bytes=100)
    for value in ("a.png", png(), data_uri(png()), Image.open(file)):
        with pytest.raises(MediaError, match="bytes, or more; at most 100 are read"):
            read_source("image", value, small)


def test_a_url_is_fetched_if_the_settings_allow_it() -> None:
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(png() if self.path == "/a.png" else b"")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert read_source("image", f"{address}/a.png", Access(urls=True)).content == png()
        with pytest.raises(MediaError, match="cannot be fetched: HTTP Error 404"):
            read_source("image", f"{address}/b.png", Access(urls=True))
        with pytest.raises(MediaError, match="bytes, or more; at most 50 are read"):
            read_source("image", f"{address}/a.png", Access(urls=True, max_bytes=50))
        server.shutdown()


@pytest.mark.parametrize("content", [b"ffconcat version 1.0\nfile {}\n", b"#EXTM3U\n#EXTINF:1,\nfile://{}\n#EXT-X-ENDLIST\n"])
def test_a_playlist_does_not_make_the_decoder_open_files(content: bytes, tmp_path: Path) -> None:
    import av

    secret = tmp_path / "secret.mp4"
    secret.write_bytes(movie(3))
    content = content.replace(b"{}", str(secret).encode())
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_video(MediaSource(kind="video", name="x", content=content), MediaLimits())
    if content.startswith(b"ffconcat"):
        # The control: without our list of formats, it would be opened.
        with av.open(io.BytesIO(content), options={"safe": "0"}, container_options={"safe": "0"}) as opened:
            assert opened.streams.video


# ---- limits --------------------------------------------------------------------------------------------------------------


def source(kind: Kind, content: bytes, rate: int | None = None) -> MediaSource:
    return MediaSource(kind=kind, name="x", content=content, rate=rate)


def test_sizes_are_bounded_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, filmed = png(24, 16), movie(3)
    monkeypatch.setattr(decode, "MOST_PIXELS", 24 * 16 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(MediaError, match="has 24 x 16 pixels; at most 383 are decoded"):
        decode_image(source("image", drawn), MediaLimits())
    with pytest.raises(MediaError, match="has 48 x 32 pixels; 1 to 383 are decoded"):
        decode_video(source("video", filmed), MediaLimits())
    monkeypatch.setattr(decode, "MOST_SECONDS", 1)
    monkeypatch.setattr(decode, "MOST_PIXELS", 10**6)
    with pytest.raises(MediaError, match="has 3 seconds; at most 1 are decoded"):
        decode_video(source("video", movie(30)), MediaLimits())
    with pytest.raises(MediaError, match="has 2 seconds; at most 1 are decoded"):
        decode_audio(source("audio", wav(2.0)), 2000, MediaLimits(), None)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 900))
@settings(max_examples=60, deadline=None)
def test_an_image_is_resized_to_the_limit(width: int, height: int, most: int) -> None:
    decoded = decode_image(source("image", png(width, height)), MediaLimits(max_pixels=most))
    assert decoded.mode == "RGB"
    assert decoded.width * decoded.height <= max(most, min(width * height, most))
    if width * height <= most:
        assert decoded.size == (width, height)
        assert np.array_equal(np.asarray(decoded), np.asarray(picture(width, height)))
    else:
        assert (decoded.width >= decoded.height) == (width >= height) or decoded.width == decoded.height


def test_what_is_too_large_is_resized_refused_or_skipped(tmp_path: Path) -> None:
    cases: list[tuple[str, Kind, bytes, dict[str, Any], str]] = [
        ("qwen2_5_vl", "image", png(64, 32), {"max_pixels": 512}, "64 x 32 pixels, more than data.max_pixels=512"),
        (
            "qwen2_5_vl",
            "video",
            movie(60),
            {"max_frames": 4},
            "6 seconds, 12 frames at data.fps=2, more than data.max_frames=4",
        ),
        ("qwen2_audio", "audio", wav(1.5), {"max_seconds": 1.0}, "more than 1 seconds, more than data.max_seconds=1"),
        ("qwen2_audio", "audio", wav(3.0), {}, "more than 2 seconds, more than the 2 seconds of the model's encoder"),
    ]
    for i, (family, kind, content, limits, message) in enumerate(cases):
        row = {"messages": question({"type": kind, kind: content})}
        (sample,) = encoded(reader_of(tmp_path / f"{i}", family, **limits), row)
        assert sample.media
        # In another process's cache, or in that of the run before: it is refused all the same.
        strict = reader_of(tmp_path / f"{i}", family, too_large="error", **limits)
        with pytest.raises(TooLargeError, match=message):
            encoded(strict, row)
        more = {name: value * 10 for name, value in limits.items()}
        if more:
            (larger,) = encoded(reader_of(tmp_path / f"{i}", family, too_large="error", **more), row)
            assert len(larger.ids) > len(sample.ids)


def test_pictures_of_all_modes_become_rgb() -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16"):
        values = np.linspace(0, 200, 24 * 16).reshape(16, 24)
        if mode in ("I", "F", "I;16"):
            drawn = Image.fromarray(values.astype({"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]))
        else:
            drawn = Image.fromarray(values.astype(np.uint8)).convert(mode)
        buffer = io.BytesIO()
        drawn.save(buffer, format="TIFF")
        decoded = decode_image(source("image", buffer.getvalue()), MediaLimits())
        assert (decoded.mode, decoded.size) == ("RGB", (24, 16)), mode
        if mode == "I;16":
            # Of 65535 levels, whatever the brightest one is: the pictures of a series stay comparable.
            assert np.asarray(decoded).max() <= 1
        if mode in ("L", "I", "F", "RGB"):
            assert np.abs(np.asarray(decoded)[..., 0].astype(float) - values).max() <= 1, mode
    # Turned as the camera noted, and of an animation the first picture.
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(source("image", png(24, 16, exif=exif)), MediaLimits(max_pixels=100))
    assert turned.height > turned.width
    assert turned.width * turned.height <= 100
    buffer = io.BytesIO()
    picture(8, 8, 0).save(buffer, format="PNG", save_all=True, append_images=[picture(8, 8, 1)])
    first = decode_image(source("image", buffer.getvalue()), MediaLimits())
    assert np.array_equal(np.asarray(first), np.asarray(picture(8, 8, 0)))


def test_audio_is_brought_to_the_rate_of_the_model() -> None:
    for rate in (2000, 8000, 44_100):
        for content, given_rate in ((wav(1.0, rate), None), (tone(1.0, rate).tobytes(), rate)):
            samples = decode_audio(source("audio", content, given_rate), 2000, MediaLimits(), 30.0)
            assert abs(len(samples) - 2000) <= 2
            assert np.abs(samples[100:1900] - tone(1.0, 2000)[100:1900]).max() < 0.12 if rate == 2000 else True
            spectrum = np.abs(np.fft.rfft(samples[:2000]))
            assert np.argmax(spectrum) == 100
    for value, message in (
        ({"array": [], "sampling_rate": 2000}, "is an array of the shape \\[0\\]"),
        ({"array": [[1.0]], "sampling_rate": 2000}, "is an array of the shape \\[1, 1\\]"),
        ({"array": [1.0, float("nan")], "sampling_rate": 2000}, "has samples that are not finite"),
        ({"array": ["a"], "sampling_rate": 2000}, "is not an array of numbers"),
        ({"array": [1.0], "sampling_rate": 0}, "sampling_rate=0"),
        ({"array": [1.0]}, "sampling_rate=None"),
    ):
        with pytest.raises(MediaError, match=message):
            read_source("audio", value, OVER_NETWORK)


def test_settings_that_cannot_work_are_refused() -> None:
    for options, message in (
        ({"max_pixels": 0}, "data.max_pixels=0"),
        ({"max_frames": 0}, "data.max_frames=0"),
        ({"fps": 0.0}, "data.fps=0.0; it must be a number above 0"),
        ({"fps": float("nan")}, "data.fps=nan"),
        ({"max_seconds": -1.0}, "data.max_seconds=-1.0"),
        ({"max_seconds": float("inf")}, "data.max_seconds=inf"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataConfig(train=("a",), **options).check()


# ---- the caches ----------------------------------------------------------------------------------------------------------


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.usefixtures("process_group")
def test_nothing_is_decoded_twice_and_what_has_changed_is_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoded: list[str] = []
    original = processors.decode_image

    def counted(source: MediaSource, limits: MediaLimits) -> Image.Image:
        decoded.append(source.name)
        return original(source, limits)

    monkeypatch.setattr(processors, "decode_image", counted)
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(png(24, 16, i))
    (tmp_path / "copy.png").write_bytes(png(24, 16, 0))
    rows = [{"messages": question(image(f"{i}.png"), image("copy.png"))} for i in (0, 1, 2, 0)]
    file = write_rows(tmp_path, [*rows, {"messages": question()}])
    data = DataConfig(train=(file,), cache_dir=str(tmp_path / "cache"), workers=0)

    def load() -> TokenDataset:
        reader = reader_of(tmp_path)
        (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
        return TokenDataset([cache], data, BUDGET, [file], store=reader.store)

    first = load()
    assert len(decoded) == 3
    assert first.digest == load().digest
    assert len(decoded) == 3
    assert [len(first.document(i, 0).media) for i in range(5)] == [2, 2, 2, 2, 0]
    # Another data set with the same pictures: tokenized, not decoded.
    (tmp_path / "other").mkdir()
    other = write_rows(tmp_path / "other", [{"messages": question(image("../1.png"))}])
    reader = reader_of(tmp_path)
    load_token_caches([other], reader.tokenizer, data, training=True, media=reader)
    assert len(decoded) == 3
    # A picture that has changed under its name.
    (tmp_path / "1.png").write_bytes(png(48, 32, 5))
    os.utime(tmp_path / "1.png", ns=(1, 1))
    changed = load()
    assert len(decoded) == 4
    assert f"has media from files that have changed ({tmp_path / '1.png'}); tokenizing it again" in caplog.text
    assert len(changed.document(1, 0).ids) > len(first.document(1, 0).ids)
    # A processed picture that was removed, and one that was cut off by a full disk.
    gone, short = (reader.store.path(changed.document(i, 0).media[0].key) for i in (0, 2))
    gone.unlink()
    again = load()
    assert len(decoded) == 5
    assert again.digest == changed.digest
    short.write_bytes(short.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"cannot be read .*start again to recreate it"):
        fields_of([again.document(2, 0)], reader.store)
    # The next start makes it anew.
    load()
    assert len(decoded) == 6
    assert fields_of([again.document(2, 0)], reader.store)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_several_processes_tokenize_the_same_media(tmp_path: Path) -> None:
    rows = [{"messages": question(image(data_uri(png(24, 16, i % 3))))} for i in range(40)]
    file = write_rows(tmp_path, rows)
    digests = []
    for workers in (0, 2):
        data = DataConfig(train=(file,), cache_dir=str(tmp_path / f"cache{workers}"), workers=workers)
        reader = reader_of(tmp_path / str(workers))
        (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
        digests.append(cache.digest)
        assert len(cache.media_keys()) == 3
        assert len(list(reader.store.folder.rglob("*.safetensors"))) == 3
        assert not list(reader.store.folder.rglob(".tmp-*"))
    assert digests[0] == digests[1]


@pytest.mark.usefixtures("process_group")
def test_rows_whose_media_are_too_large_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = [(24, 16), (64, 64), (16, 16), (80, 64)]
    file = write_rows(tmp_path, [{"messages": question(image(data_uri(png(*size))))} for size in sizes])
    settings_of: dict[str, Any] = {"train": (file,), "cache_dir": str(tmp_path / "cache"), "workers": 0, "max_pixels": 1000}
    policies: list[tuple[TooLarge, int]] = [("skip", 2), ("resize", 4)]
    for policy, kept in policies:
        data = DataConfig(too_large=policy, **settings_of)
        reader = reader_of(tmp_path, max_pixels=1000, too_large=policy)
        (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
        assert len(TokenDataset([cache], data, BUDGET, [file], store=reader.store)) == kept
    assert f"(data.too_large=skip): 2 rows with media that are too large, the first is {file}:2" in caplog.text
    reader = reader_of(tmp_path, max_pixels=1000, too_large="error")
    data = DataConfig(too_large="error", **settings_of)
    with pytest.raises(
        DataError, match=f"{file}:2: the image \(data URI\) has 64 x 64 pixels, more than data.max_pixels=1000; .*, or skip"
    ):
        load_token_caches([file], reader.tokenizer, data, training=True, media=reader)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("policy", ["truncate_left", "truncate_right", "split"])
def test_a_cut_never_leaves_half_an_image(policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a" * 9}, image(data_uri(png(40, 24))), {"type": "text", "text": "b" * 9}],
        },
        {"role": "assistant", "content": "c" * 30},
    ]
    file = write_rows(tmp_path, [{"messages": chat}, {"messages": question(text="d" * 90)}])
    reader = reader_of(tmp_path)
    data = DataConfig(train=(file,), cache_dir=str(tmp_path / "cache"), workers=0)
    (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
    (span,) = cache.media(0)
    outcomes = set()
    for most in range(18, int(cache.lengths.max()) + 1):
        cut = DataConfig(train=(file,), max_length=most, too_long=policy, train_on="all")  # type: ignore[arg-type]
        try:
            dataset = TokenDataset([cache], cut, BUDGET, [file], store=reader.store)
        except DataError as e:
            assert "no sample of" in str(e)  # noqa: PT017
            continue
        pieces = [dataset.document(i, 0) for i in range(len(dataset))]
        for piece in pieces:
            assert len(piece.ids) <= most
            assert list(piece.ids).count(IMAGE) == (span.last - span.first) * len(piece.media)
            for inside in piece.media:
                assert piece.ids[inside.first] == piece.ids[inside.last - 1] == IMAGE
            outcomes.add(len(piece.media))
        Loader(dataset, Sampler(dataset.sizes, weights=None, seed=0, shuffle=False), batch_size=9).batch(
            range(len(dataset))
        ).shard(0, 1, 0.0)
    assert outcomes == {0, 1}
    if policy == "split":
        with pytest.raises(DataError, match=r"has 15 tokens for one image, more than a piece of 10; raise data\.max_length"):
            TokenDataset([cache], DataConfig(train=(file,), max_length=10, too_long="split"), BUDGET, [file])


@pytest.mark.usefixtures("process_group")
def test_batches_carry_the_fields_of_their_documents(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, "qwen2_5_omni_thinker")
    parts: list[list[Any]] = [
        [{"type": "audio", "audio": {"array": tone(0.5, 2000).tolist(), "sampling_rate": 2000}}],
        [],
        [image(data_uri(png(40, 24))), image(data_uri(png(16, 16, 1)))],
        [{"type": "audio", "audio": data_uri(wav(1.5), "audio/wav")}, image(data_uri(png(16, 16, 1)))],
    ]
    file = write_rows(tmp_path, [{"messages": question(*one)} for one in parts])
    data = DataConfig(train=(file,), cache_dir=str(tmp_path / "cache"), workers=0)
    (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
    dataset = TokenDataset([cache], data, BUDGET, [file], store=reader.store)
    loader = Loader(dataset, Sampler(dataset.sizes, weights=None, seed=0, shuffle=False), batch_size=4)
    batch = loader.batch(range(4)).shard(0, 1, 0.0).batch
    assert {name: field.counts.tolist() for name, field in batch.media.items()} == {
        "input_features": [1, 0, 0, 1],
        "feature_attention_mask": [1, 0, 0, 1],
        "pixel_values": [0, 0, 60 + 16, 16],
        "image_grid_thw": [0, 0, 2, 1],
    }
    # The shorter audio is filled up, and its mask says so.
    assert batch.media["feature_attention_mask"].values.sum(1).tolist() == [10, 30]
    assert batch.media["input_features"].values.shape == (2, 16, 30)
    whole = PackedBatch.concat([loader.batch([i]).shard(0, 1, 0.0).batch for i in range(4)])
    for name, field in batch.media.items():
        assert torch.equal(whole.media[name].values, field.values)
        assert whole.media[name].counts.tolist() == field.counts.tolist()
    # Documents 2 and 3 have images, whose encoder costs more than all tokens.
    sides = [
        loader.batch(range(4)).shard(rank, 2, 0.0, lambda kind, features, parts: 1e4 if kind == "image" else 0.0).positions
        for rank in range(2)
    ]
    assert sorted(sides) == [[0, 1, 3], [2]]
    masks = [torch.ones(1, 3), torch.ones(2, 5)]
    for shape in ((2, -1), (-1, 2)):
        # Time is the last axis, or the one before.
        audio = [torch.ones(len(mask), *(size if size > 0 else mask.shape[1] for size in shape)) for mask in masks]
        rows = joined_rows({"input_features": audio, "input_features_mask": masks})
        assert rows["input_features_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1] * 5]
        assert rows["input_features"].sum((1, 2)).tolist() == [6, 10, 10]
    # Patches and bins of two processors are not filled up.
    unlike: dict[str, dict[str, list[torch.Tensor]]] = {
        "pixel_values": {"pixel_values": [torch.zeros(1, 2), torch.zeros(1, 3)]},
        "input_features": {"input_features": [torch.zeros(1, 2, 3), torch.zeros(2, 4, 5)], "input_features_mask": masks},
    }
    for name, tensors in unlike.items():
        with pytest.raises(BatchError, match=f"rows of {name} have the shapes .* cannot be joined"):
            joined_rows(tensors)
    with pytest.raises(BatchError, match=r"rows of input_features have the shapes .* cannot be joined"):
        joined_rows({"input_features": [torch.zeros(1, 80, 3), torch.zeros(1, 128, 3)], "input_features_mask": [masks[0]] * 2})


@pytest.mark.usefixtures("process_group")
def test_rows_of_text_alone_have_the_digest_that_they_had(tmp_path: Path) -> None:
    """So that a checkpoint from before there were media finds its data unchanged."""
    from drivetrain.trainers.tasks.addition import make_tokenizer

    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+2=", "completion": "3"}\n')
    data = DataConfig(train=(str(file),), cache_dir=str(tmp_path / "cache"), workers=0)
    (cache,) = load_token_caches([str(file)], make_tokenizer(), data, training=True)
    assert cache.digest == "4834482da432271d4533ca33342f8200"


def test_logging_is_quiet_about_media(qwen: MediaReader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        encoded(qwen, {"messages": question(image(png()))})
    assert not caplog.records


@pytest.mark.usefixtures("process_group")
def test_shares_count_what_encoders_do(tmp_path: Path) -> None:
    """Of documents of about one length, those with pictures are divided among the ranks."""
    pictures = [image(data_uri(png(40, 24, i))) for i in range(4)]
    rows = [{"messages": question(picture)} for picture in pictures]
    rows += [{"messages": question(text="a" * 24)} for _ in range(4)]
    file = write_rows(tmp_path, rows)
    reader = reader_of(tmp_path)
    data = DataConfig(train=(file,), cache_dir=str(tmp_path / "cache"), workers=0)
    (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
    dataset = TokenDataset([cache], data, BUDGET, [file], store=reader.store)
    batch = Loader(dataset, Sampler([8], weights=None, seed=0, shuffle=False), batch_size=8).batch(range(8))
    told: list[tuple[str, int, int]] = []

    def cost(kind: str, features: int, parts: int) -> float:
        told.append((kind, features, parts))
        return 1000.0

    def with_pictures(**options: Any) -> list[int]:
        return [sum(p < 4 for p in batch.shard(rank, 2, 0.0, **options).positions) for rank in range(2)]

    assert with_pictures(media_cost=cost) == [2, 2]
    assert set(told) == {("image", 15, 1)}
    # The control: by tokens alone, the longer documents with pictures are not told from the others.
    assert with_pictures(media_cost=lambda *_: 0.0) == with_pictures()
    lengths = [len(dataset.document(i, 0).ids) for i in range(8)]
    assert balance([*lengths], 2, ratio=0.0, media=[0.0] * 8) == balance([*lengths], 2, ratio=0.0)


@pytest.mark.usefixtures("process_group")
def test_tables_and_rows_in_memory_have_media(tmp_path: Path) -> None:
    import datasets

    row = {"prompt": [{"role": "user", "content": "<image>how many"}], "completion": [ANSWER]}
    content = [png(24, 16, i) for i in range(3)]
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "completion": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": [datasets.Image()],
        }
    )
    rows = [{**row, "images": [{"bytes": one, "path": None}]} for one in content]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    reader = reader_of(tmp_path)
    data = DataConfig(cache_dir=str(tmp_path / "cache"), workers=0)
    encoder = Encoder(reader.tokenizer, data, media=reader)
    sources = [
        DataSource("hub", table=table, columns={}),
        DataSource("stream", table=table.to_iterable_dataset(), columns={}),
        DataSource("parquet", files=(tmp_path / "rows.parquet",)),
        DataSource("dataset", rows=table, every_column=True),
        DataSource("memory", rows=[{**row, "images": [Image.open(io.BytesIO(one))]} for one in content], every_column=True),
    ]
    every = [[part for chunk in source.chunks() for part in (encoder.chunk(chunk),)] for source in sources]
    ids = [np.concatenate([part.ids for part in parts]).tolist() for parts in every]
    assert all(one == ids[0] for one in ids)
    digests = [np.concatenate([part.media_digests for part in parts]).tolist() for parts in every]
    assert digests[0] == digests[1] == digests[2] == digests[3]
    assert len(set(digests[0])) == 3


@pytest.mark.usefixtures("process_group")
def test_pictures_of_one_size_are_not_taken_for_equal(tmp_path: Path) -> None:
    """Their tokens are the same, so duplicates, and the prompts that KTO pairs with other answers, go by their content too."""
    rows = [{"messages": question(image(data_uri(png(24, 16, seed))))} for seed in (0, 1, 0)]
    file = write_rows(tmp_path, rows)
    reader = reader_of(tmp_path)
    data = DataConfig(train=(file,), cache_dir=str(tmp_path / "cache"), workers=0)
    (cache,) = load_token_caches([file], reader.tokenizer, data, training=True, media=reader)
    assert Facts.of([cache]).duplicates() == (1, f"{file}:3 equals {file}:1")
    documents = [cache.sample(i, 0, int(cache.lengths[i])) for i in range(3)]
    assert documents[0].ids == documents[1].ids
    batch = GlobalBatch(lengths=[len(d.ids) for d in documents], read=lambda i: documents[i], store=reader.store)
    others = mismatched(batch, 100)
    # Each keeps its own picture before the other's answer; the third and the first have the same prompt.
    assert [others.read(i).media for i in range(len(others))] == [d.media for d in documents]
    assert others.shard(0, 1, 0.0).batch.media["image_grid_thw"].counts.tolist() == [1, 1, 1]
    same = GlobalBatch(lengths=batch.lengths[::2], read=lambda i: documents[2 * i], store=reader.store)
    assert len(mismatched(same, 100)) == 0


def test_a_video_is_turned_as_its_camera_noted() -> None:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        right = np.zeros((32, 48, 3), np.uint8)
        right[:, 24:] = 255
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(right)))
        container.mux(stream.encode())
    plain = buffer.getvalue()
    # The matrix of the track's header (ISO 14496-12): to the right becomes down, which is a quarter turn clockwise.
    at = plain.index(b"tkhd") + 4 + 40
    turned = plain[:at] + struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30) + plain[at + 36 :]
    for content, size, bright in ((plain, (48, 32), (40, 16)), (turned, (32, 48), (16, 40))):
        frame = decode_video(MediaSource(kind="video", name="x", content=content), MediaLimits(), 1).frames[0]
        assert frame.size == size
        pixels: Any = frame.getpixel(bright)
        other: Any = frame.getpixel((size[0] - 1 - bright[0], size[1] - 1 - bright[1]))
        assert min(pixels) > 200
        assert max(other) < 50
