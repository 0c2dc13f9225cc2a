"""Checks of media in packed batches, and the division of encoders' work."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMultimodalLM

from drivetrain.engine.errors import BatchError, ModelError
from drivetrain.engine.hf.media import FAMILIES, check_media_support
from drivetrain.engine.hf.media_family import MediaFamily
from drivetrain.engine.hf.shape import encoder_shapes, field_costs
from drivetrain.engine.media import (
    Items,
    MediaSummary,
    check_media,
    comparable_ids,
    items_of,
    kinds_of,
    positions_of,
    select_items,
    share_items,
)
from drivetrain.engine.packing.batch import MediaField, PackedBatch
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.prefixes import Prefixes
from drivetrain.engine.packing.sharing import find_prefixes, shared_layout
from drivetrain.engine.tiny_media import IMAGE, VIDEO, random_item, tiny_media_config

QWEN = FAMILIES["qwen2_5_vl"](tiny_media_config("qwen2_5_vl"))
TILES = FAMILIES["smolvlm"](tiny_media_config("smolvlm"))


def field(values: Tensor, *counts: int) -> MediaField:
    return MediaField(values=values, counts=torch.tensor(counts))


def qwen_batch(ids: list[list[int]], **changes: Any) -> PackedBatch:
    """Two documents; the first has images of 16 and 8 patches, of which four are a token."""
    media = {
        "pixel_values": field(torch.ones(24, 96), 24, 0),
        "image_grid_thw": field(torch.tensor([[1, 4, 4], [1, 4, 2]]), 2, 0),
        **changes,
    }
    return from_lists(ids, media={k: v for k, v in media.items() if v is not None}, names=["a.jsonl:1", "a.jsonl:2"])


RIGHT = [[5, *[IMAGE] * 4, 6, *[IMAGE] * 2, 7], [8, 9]]


def test_items_have_their_rows_features_and_tokens() -> None:
    batch = qwen_batch(RIGHT)
    assert check_media(batch, QWEN, "tiny").kinds == ["image"]
    items = items_of(batch, QWEN, "image")
    assert (items.rows, items.features, items.tokens.tolist()) == ([16, 8], [4, 2], [1, 2, 3, 4, 6, 7])
    none = items_of(batch, QWEN, "video")
    assert (none.rows, none.features, none.tokens.tolist()) == ([], [], [])
    tiles = from_lists(
        [[IMAGE] * 8],
        media={"pixel_values": field(torch.ones(2, 3, 16, 16), 2), "pixel_attention_mask": field(torch.ones(2, 16, 16), 2)},
    )
    assert check_media(tiles, TILES, "tiny").kinds == ["image"]
    assert items_of(tiles, TILES, "image").features == [4, 4]


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        (
            [RIGHT[0][:-2], RIGHT[1]],
            {},
            r"a.jsonl:1 has 5 image tokens \(id 250\), but 2 images, which take 6; let the model's processor",
        ),
        ([RIGHT[0], [8, IMAGE]], {}, r"a.jsonl:2 has 1 image tokens \(id 250\), but 0 images, which take 0"),
        (RIGHT, {"pixel_values": None}, "the batch has image_grid_thw without pixel_values, which tiny needs beside it"),
        (RIGHT, {"image_grid_thw": None}, "the batch has pixel_values without image_grid_thw"),
        (
            RIGHT,
            {"pixel_values": field(torch.zeros(20, 96), 20, 0)},
            "a.jsonl:1 has 20 rows of pixel_values, but by its image_grid_thw it",
        ),
        (
            RIGHT,
            {"input_features": field(torch.zeros(1, 9), 1, 0)},
            "the batch has the media field 'input_features', but tiny takes pixel_v",
        ),
        ([[5, 6], [8, 9]], {"pixel_values": None, "image_grid_thw": None}, ""),
    ],
)
def test_media_that_do_not_fit_their_tokens_are_refused(ids: list[list[int]], changes: dict[str, Any], message: str) -> None:
    if not message:
        assert check_media(qwen_batch(ids, **changes), QWEN, "tiny").kinds == []
        return
    with pytest.raises(BatchError, match=message):
        check_media(qwen_batch(ids, **changes), QWEN, "tiny")


def test_fields_with_different_numbers_of_items_are_refused() -> None:
    batch = from_lists(
        [[IMAGE] * 8],
        media={"pixel_values": field(torch.ones(2, 3, 16, 16), 2), "pixel_attention_mask": field(torch.ones(1, 16, 16), 1)},
    )
    with pytest.raises(
        BatchError, match="sequence 0 has 2 rows of pixel_values, but by its pixel_attention_mask it should have 1"
    ):
        check_media(batch, TILES, "tiny")
    videos = from_lists(
        [[VIDEO] * 2],
        media={
            "pixel_values_videos": field(torch.zeros(8, 96), 8),
            "video_grid_thw": field(torch.tensor([[1, 4, 2]]), 1),
            "second_per_grid_ts": field(torch.ones(2), 2),
        },
    )
    with pytest.raises(BatchError, match="sequence 0 has 1 rows of video_grid_thw and 2 of second_per_grid_ts"):
        check_media(videos, QWEN, "tiny")


def test_a_model_without_encoders_takes_no_media() -> None:
    with pytest.raises(BatchError, match="the batch has the media field 'image_grid_thw', but tiny takes no media"):
        check_media(qwen_batch(RIGHT), None, "tiny")
    assert check_media(from_lists([[IMAGE]]), None, "tiny") == MediaSummary()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "features", "gaps"),
    [([16, 8, 24, 4], [4, 2, 6, 1], [1, 3, 0, 2]), ([8], [2], [5]), ([], [], []), ([4] * 9, [1] * 9, [0, 2] * 4 + [1])],
)
def test_every_feature_arrives_at_its_token(ranks: int, rows: list[int], features: list[int], gaps: list[int]) -> None:
    tokens: list[int] = []
    start = 0
    for gap, count in zip(gaps, features, strict=True):
        start += gap
        tokens += range(start, start + count)
        start += count
    size = -(-max(start + 2, 24) // ranks)
    items = Items(rows=rows, features=features, tokens=torch.tensor(tokens, dtype=torch.long), fields={})
    shares = [share_items(items, rank, ranks, size) for rank in range(ranks)]
    assert sorted(item for share in shares for item in share.items) == list(range(len(rows)))
    # Each feature is the number of its token; the exchange is done by hand.
    starts = [sum(features[:i]) for i in range(len(features))]
    sent = []
    for share in shares:
        mine = torch.tensor([tokens[starts[i] + k] for i in share.items for k in range(features[i])], dtype=torch.long)
        sent.append(mine[share.sent].split(share.send))
    for rank, share in enumerate(shares):
        received = torch.cat([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == share.receive
        assert received[share.order].tolist() == [t for t in tokens if rank * size <= t < (rank + 1) * size]
    loads = [sum(features[i] for i in share.items) for share in shares]
    assert max(loads) - min(loads) <= max(features, default=0)


def test_fields_of_some_items() -> None:
    media = {"pixel_values": torch.arange(24.0)[:, None], "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 2]])}
    items = Items(rows=[16, 8], features=[4, 2], tokens=torch.arange(6), fields=media)
    second = select_items(items, QWEN.modalities["image"], [1])
    assert second["pixel_values"][:, 0].tolist() == list(range(16, 24))
    assert second["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert select_items(items, QWEN.modalities["image"], [0, 1])["pixel_values"] is media["pixel_values"]


def test_fields_without_rows_are_no_media() -> None:
    text = qwen_batch(RIGHT).select([1])
    assert len(text.media["pixel_values"].values) == 0
    assert kinds_of(text, QWEN) == []
    assert not check_media(text, QWEN, "tiny").kinds


def test_tokens_of_media_are_text_where_nobody_has_media() -> None:
    summary = check_media(from_lists([[5, VIDEO, 6]]), QWEN, "tiny")
    assert (summary.kinds, list(summary.stray)) == ([], ["video"])
    assert "has 1 video tokens (id 251), but 0 videos" in summary.stray["video"]


AUDIO_FAMILY = FAMILIES["qwen2_audio"](tiny_media_config("qwen2_audio"))


@pytest.mark.parametrize(
    ("family", "media", "message"),
    [
        (
            QWEN,
            {"pixel_values": torch.zeros(16, 95), "image_grid_thw": torch.tensor([[1, 4, 4]])},
            r"\[16, 95\]; it must be \[M, 96\]",
        ),
        (
            QWEN,
            {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[4, 4]])},
            r"image_grid_thw has the shape \[1, 2\]",
        ),
        (
            QWEN,
            {"pixel_values": torch.zeros(16, 96), "image_grid_thw": torch.tensor([[1.0, 4, 4]])},
            "float32; it must have an integer dtype",
        ),
        (
            QWEN,
            {"pixel_values": torch.zeros(15, 96), "image_grid_thw": torch.tensor([[1, 3, 5]])},
            r"sequence 0 has media of the kind image with image_grid_thw \[1, 3, 5\]; time, height and width must be at least 1, and height and width multiples of 2",
        ),
        (
            QWEN,
            {"pixel_values": torch.zeros(0, 96), "image_grid_thw": torch.tensor([[0, 4, 4]])},
            r"image_grid_thw \[0, 4, 4\]",
        ),
        (
            TILES,
            {"pixel_values": torch.ones(1, 3, 32, 32), "pixel_attention_mask": torch.ones(1, 32, 32)},
            r"must be \[M, 3, 16, 16\]",
        ),
        (
            TILES,
            {"pixel_values": torch.zeros(1, 3, 16, 16), "pixel_attention_mask": torch.ones(1, 16, 16)},
            "all zero, which the model treats",
        ),
        (
            AUDIO_FAMILY,
            {"input_features": torch.zeros(1, 16, 41), "feature_attention_mask": torch.ones(1, 41)},
            r"input_features has the shape \[1, 16, 41\]; it must be \[M, 16, 40\]",
        ),
        (
            AUDIO_FAMILY,
            {"input_features": torch.zeros(1, 16, 40), "feature_attention_mask": (torch.arange(40) < 3).long()[None]},
            "sequence 0 has media of the kind audio with feature_attention_mask with 3 frames; an audio needs at least 4",
        ),
    ],
)
def test_malformed_fields_are_refused(family: MediaFamily, media: dict[str, Tensor], message: str) -> None:
    batch = from_lists([[5, 6]], media={name: field(value, len(value)) for name, value in media.items()})
    with pytest.raises(BatchError, match=message):
        check_media(batch, family, "tiny")


def test_positions_are_refused_where_they_cannot_be_computed() -> None:
    batch = qwen_batch([[5, *[IMAGE] * 6, 7], [8, 9]])
    assert check_media(batch, QWEN, "tiny").kinds == ["image"]
    with torch.device("meta"):
        base = AutoModelForMultimodalLM.from_config(tiny_media_config("qwen2_5_vl")).model
    # Two images without a token between them are one to the family.
    with pytest.raises(
        BatchError, match=r"a.jsonl:1: the positions of its image cannot be computed .*; let the model's processor"
    ):
        positions_of(batch, QWEN, base, ["image"])
    positions = positions_of(qwen_batch(RIGHT), QWEN, base, ["image"])
    assert positions.shape == (3, 11)
    assert positions[:, -2:].tolist() == [[0, 1]] * 3
    with pytest.raises(
        BatchError, match=r"position_ids has 2 axes, but tiny has 3; give \[T\], and the other axes are computed"
    ):
        check_media(qwen_batch(RIGHT).with_position_ids(torch.zeros(2, 11, dtype=torch.long)), QWEN, "tiny")


def test_batches_with_and_without_media_are_concatenated() -> None:
    batch = PackedBatch.concat([from_lists([[5, 6]]), qwen_batch(RIGHT).select([0])._derive(names=None)])
    assert batch.media["pixel_values"].counts.tolist() == [0, 24]
    assert batch.media["image_grid_thw"].counts.tolist() == [0, 2]
    assert check_media(batch, QWEN, "tiny").kinds == ["image"]


def test_items_that_documents_share_are_encoded_once() -> None:
    ids = [[5, *[IMAGE] * 4, 6], [5, *[IMAGE] * 4, 7], [5, *[IMAGE] * 4, 6]]
    pixels = torch.arange(16.0)[:, None].expand(16, 96)
    batch = from_lists(
        ids,
        media={
            "pixel_values": field(torch.cat([pixels, pixels, pixels + 1]), 16, 16, 16),
            "image_grid_thw": field(torch.tensor([[1, 4, 4]] * 3), 1, 1, 1),
        },
    )
    comparable = comparable_ids(batch, QWEN, ["image"]).view(3, 6)
    assert torch.equal(comparable[0, :5], comparable[1, :5])
    assert not bool((comparable[0, 1:5] == comparable[2, 1:5]).any())
    assert comparable[:, 0].tolist() == [5] * 3
    assert len(set(comparable[0, 1:5].tolist())) == 1
    prefixes = find_prefixes(batch, ids=comparable.reshape(-1))
    # Of the common beginning the last token, here one of an image, is each document's own.
    assert prefixes == Prefixes(families=(0, 0, -1), parents=(4,))
    layout = shared_layout(batch.lengths, prefixes)
    assert layout is not None
    items = items_of(batch, QWEN, "image").computed(layout.origin, QWEN.modalities["image"])
    assert (items.rows, items.features) == ([16, 16], [4, 4])
    assert items.tokens.tolist() == [1, 2, 3, 4, 6, 9, 10, 11, 12]
    assert items.index is not None
    assert items.index.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7]
    assert torch.equal(items.fields["pixel_values"], torch.cat([pixels, pixels + 1]))
    assert find_prefixes(batch) is None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flops_of_encoders_are_those_that_torch_counts(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model: Any = AutoModelForMultimodalLM.from_config(
        tiny_media_config(family), dtype=torch.float32, attn_implementation="eager"
    )
    base = getattr(model, model.base_model_prefix)
    shapes, ours = encoder_shapes(model), FAMILIES[family](base.config)
    assert set(shapes) == set(ours.modalities)
    for kind in ours.modalities:
        for size in (1, 2):
            _, fields = random_item(family, kind, size, 0)
            # An even number of steps: the last one of an odd number has no feature.
            if kind == "audio":
                fields = {**fields, ours.modalities["audio"].items[0]: torch.ones(1, 40, dtype=torch.long)}
            items = list(zip(ours.features_of(kind, fields), ours.parts(kind, fields), strict=True))
            with FlopCounterMode(display=False) as counter:
                encoded = ours.encode(base, kind, ours.trimmed(kind, fields))
                forward = counter.get_total_flops()
                encoded.sum().backward()
            counts = [sum(shapes[kind].flops(*item, training=training) for item in items) for training in (False, True)]
            read = ours.trimmed(kind, fields)[ours.modalities[kind].values]
            by_elements = field_costs(model, shapes, 0.5)[ours.modalities[kind].values] * read.numel()
            # But for attention inside of an item.
            assert 0.7 * counts[0] <= by_elements <= 1.01 * counts[0], (kind, size)
            # InternVL has one more patch, a class token; the first layer of none gives a gradient to its pixels.
            assert counts[0] == pytest.approx(forward, rel=0.06), (kind, size)
            assert counts[1] == pytest.approx(counter.get_total_flops(), rel=0.1), (kind, size)


GEMMA4 = FAMILIES["gemma4"](tiny_media_config("gemma4"))


def grid_positions(wide: int, high: int, padded: int) -> Tensor:
    """`[1, padded, 2]`, the positions of the patches of an image."""
    grid = torch.stack(torch.meshgrid(torch.arange(wide), torch.arange(high), indexing="xy"), -1).reshape(-1, 2)
    return torch.cat([grid, torch.full((padded - len(grid), 2), -1)])[None]


def test_padding_of_gemma4_takes_no_part() -> None:
    pixels = torch.rand(2, 32, 48)
    both = {"pixel_values": pixels, "image_position_ids": torch.cat([grid_positions(4, 2, 32), grid_positions(6, 4, 32)])}
    assert GEMMA4.problem("image", both) is None
    assert GEMMA4.features_of("image", both) == [2, 6]
    assert {name: value.shape[1] for name, value in GEMMA4.trimmed("image", both).items()} == dict.fromkeys(both, 24)
    audio = {"input_features": torch.rand(2, 40, 16), "input_features_mask": torch.arange(40) < torch.tensor([[3], [17]])}
    assert GEMMA4.problem("audio", audio) is None
    assert GEMMA4.features_of("audio", audio) == [1, 5]
    assert {value.shape[1] for value in GEMMA4.trimmed("audio", audio).values()} == {17}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "image",
            {"pixel_values": torch.ones(1, 32, 47)},
            r"pixel_values has the shape \[1, 32, 47\]; it must be \[M, 32, 48\]",
        ),
        ("image", {"pixel_values": torch.ones(48)}, "pixel_values has the shape"),
        ("image", {"image_position_ids": grid_positions(4, 2, 24)}, r"image_position_ids has the shape \[1, 24, 2\]"),
        ("image", {"image_position_ids": grid_positions(4, 2, 32).float()}, "it must have a signed integer dtype"),
        ("image", {"image_position_ids": grid_positions(4, 2, 32).byte()}, "it must have a signed integer dtype"),
        ("image", {"pixel_values": torch.ones(1, 0, 48), "image_position_ids": torch.ones(1, 0, 2).long()}, "has 0 patches"),
        ("image", {"pixel_values": torch.ones(1, 30, 48), "image_position_ids": grid_positions(4, 2, 30)}, "a multiple of 4"),
        ("image", {"image_position_ids": grid_positions(3, 2, 32)}, "sides that are multiples of 2"),
        ("image", {"image_position_ids": torch.full((1, 32, 2), -1)}, "sides that are multiples of 2"),
        ("image", {"image_position_ids": grid_positions(4, 2, 32).flip(1)}, "in row-major order"),
        ("image", {"image_position_ids": grid_positions(4, 2, 32).flip(2)}, "in row-major order"),
        (
            "image",
            {"pixel_values": torch.ones(1, 516, 48), "image_position_ids": grid_positions(258, 2, 516)},
            "beyond the 256 that",
        ),
        (
            "video",
            {"pixel_values_videos": torch.ones(1, 32, 47), "video_position_ids": grid_positions(4, 2, 32)},
            "pixel_values_videos",
        ),
        ("audio", {"input_features": torch.ones(1, 16, 40)}, r"\[1, 16, 40\]; it must be \[M, 16, 16\]"),
        ("audio", {"input_features_mask": torch.ones(1, 39)}, r"\[1, 39\]; it must be \[M, 40\]"),
        ("audio", {"input_features_mask": torch.zeros(1, 40)}, "the audio is too short"),
        ("audio", {"input_features_mask": torch.arange(40)[None] > 3}, "padding before frames"),
    ],
)
def test_fields_that_gemma4_cannot_take_are_refused(kind: Any, fields: dict[str, Tensor], message: str) -> None:
    right = {
        "image": {"pixel_values": torch.ones(1, 32, 48), "image_position_ids": grid_positions(4, 2, 32)},
        "audio": {"input_features": torch.ones(1, 40, 16), "input_features_mask": torch.ones(1, 40)},
    }
    problem = GEMMA4.problem(kind, {**right.get(kind, {}), **fields})
    assert problem is not None
    assert re.search(message, problem[1])


def test_a_gemma4_without_audio_takes_none() -> None:
    config: Any = tiny_media_config("gemma4")
    config.audio_config = None
    family = FAMILIES["gemma4"](config)
    assert list(family.modalities) == ["image", "video"]
    fields = {"input_features": field(torch.ones(1, 40, 16), 1), "input_features_mask": field(torch.ones(1, 40), 1)}
    with pytest.raises(BatchError, match="the batch has the media field 'input_features', but tiny takes pixel_values"):
        check_media(from_lists([[5, 6]], media=fields), family, "tiny")


def test_images_of_gemma4_are_blocks_where_the_config_says_so() -> None:
    config: Any = tiny_media_config("gemma4")
    assert GEMMA4.block_kinds == ("image", "video")
    config.get_text_config().use_bidirectional_attention = None
    assert FAMILIES["gemma4"](config).block_kinds == ()


def test_encoders_of_another_release_are_refused() -> None:
    """As transformers 5.17 has them, whose encoder of Gemma 4's videos does not take the number of frames."""
    with torch.device("meta"):
        model: Any = AutoModelForMultimodalLM.from_config(tiny_media_config("gemma4"))
        other: Any = AutoModelForMultimodalLM.from_config(tiny_media_config("internvl"))
    check_media_support(model)
    check_media_support(other)

    class Older(type(model.model)):  # type: ignore[misc]
        def get_video_features(self, pixel_values_videos: Tensor, video_position_ids: Tensor) -> None: ...

    class OlderInternVL(type(other.model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor) -> None: ...

    model.model.__class__, other.model.__class__ = Older, OlderInternVL
    with pytest.raises(
        ModelError, match=r"Older.get_video_features of transformers .* does not take num_frames_per_video; install"
    ):
        check_media_support(model)
    with pytest.raises(
        ModelError, match=r"OlderInternVL.forward of transformers .* does not take mm_encoder_outputs; install"
    ):
        check_media_support(other)
