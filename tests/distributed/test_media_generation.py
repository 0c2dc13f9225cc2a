"""Generation from prompts with images, videos and audio, against the log-probabilities of a training engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError
from drivetrain.engine.hf.layout import DiskLayout
from drivetrain.engine.hf.tokenizer import load_tokenizer
from drivetrain.engine.loss import OutputRequest
from drivetrain.engine.packing.batch import media_fields
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.registry import engine_class
from drivetrain.engine.tiny_media import IMAGE, MEDIA_FAMILIES
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.registry import build_generator
from drivetrain.media.decode import MediaLimits
from drivetrain.media.processors import PROCESSORS
from drivetrain.media.sources import OVER_NETWORK, read_source
from helpers.media import data_uri, png, save_media_model
from helpers.media_steps import Document, document, save

OPTIONS = SamplingOptions(max_tokens=8, samples=3, seed=1, ignore_eos=True)
GENERATORS = ["static", "continuous"]
BOTH_DIRECTIONS = {"gemma3", "gemma4"}
TILES = {"internvl", "idefics3", "smolvlm"}
FAST = {("qwen2_5_vl", "static"), ("qwen3_vl", "continuous"), ("qwen2_audio", "static")}


def documents(family: str) -> list[Document]:
    """With the same tokens for other media, and with the same media twice."""
    first = document(family, 1, 1)
    changed = {name: value + 0.5 if value.is_floating_point() else value for name, value in first[1][0].items()}
    kinds = [document(family, 4, 1, kind="video"), document(family, 5, 1, 2, kind="audio")]
    return [first, document(family, 2), document(family, 3, 2, 1), *kinds, first, (first[0], [changed])]


def media_of(documents: list[Document]) -> list[Mapping[str, Tensor]]:
    return [{name: field.values for name, field in media_fields([items]).items()} for _, items in documents]


@contextmanager
def generator_of(folder: Path, name: str, **settings: Any) -> Iterator[Any]:
    config = RolloutConfig(model=ModelConfig(path=str(folder)), generator=name, **settings)
    generator: Any = build_generator(config)
    try:
        yield generator
    finally:
        generator.close()


class Actor:
    """The log-probabilities of completions, by an engine."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=1024))
        self.engine = engine_class("fsdp")(model=ModelConfig(path=str(folder)), engine=config).initialize()

    def check(self, documents: list[Document], completions: Any) -> None:
        for (ids, items), samples in zip(documents, completions, strict=True):
            for sample in samples:
                assert sample.prompt == ids
                whole = [*ids, *sample.response]
                learned = [i >= len(ids) for i in range(len(whole))]
                batch = from_lists([whole], supervised=[learned], media=media_fields([items]))
                expected = self.engine.infer_batch(batch, OutputRequest(log_probs=True))["log_probs"]
                computed = torch.tensor(sample.log_probs)
                torch.testing.assert_close(computed, expected[len(ids) - 1 : -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "generator"),
    [
        pytest.param(family, generator, marks=[] if (family, generator) in FAST else pytest.mark.slow)
        for family in MEDIA_FAMILIES
        if family not in BOTH_DIRECTIONS
        for generator in GENERATORS
    ],
)
def test_log_probabilities_are_the_actors(family: str, generator: str, tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", family)
    prompts = documents(family)
    # Small parts, so that prompts are cut in the middle of media.
    with generator_of(folder, generator, target_tokens_per_batch=16) as built:
        completions = built.generate([ids for ids, _ in prompts], OPTIONS, media=media_of(prompts))
        features = built._lm.media
        # Once for all completions to a prompt, and for equal media of two prompts.
        assert features.encoded == (9 if family in TILES else 7)
        assert not features._items
        again = built.generate([ids for ids, _ in prompts], OPTIONS, media=media_of(prompts))
    Actor(folder).check(prompts, completions)
    assert responses(completions) == responses(again)
    assert not {token for samples in completions for s in samples for token in s.response} & set(features.tokens)


def responses(completions: Any) -> list[list[list[int]]]:
    return [[sample.response for sample in samples] for samples in completions]


@pytest.mark.parametrize("generator", [pytest.param("static", marks=pytest.mark.slow), "continuous"])
def test_new_weights_encode_media_anew(generator: str, tmp_path: Path, process_group: None) -> None:
    family = "qwen3_vl"
    first, second = save(tmp_path / "first", family), save_tiny_model(tmp_path / "second", family, seed=1)
    prompts = documents(family)
    ids, media = [ids for ids, _ in prompts], media_of(prompts)
    new = Actor(second)
    with generator_of(first, generator) as built:
        # Some have begun: they go on with the new weights after the tokens that they have.
        streams = [
            built.submit(one, OPTIONS, row=i, media=fields) for i, (one, fields) in enumerate(zip(ids, media, strict=True))
        ]
        for _ in range(3):
            built.step()
        tokens = [len(stream.tokens) for stream in streams]
        assert 0 < max(tokens) < OPTIONS.max_tokens
        with new.engine.named_weights() as weights:
            built.load_weights(weights, version=7)
        while built.step():
            pass
        assert all(stream.versions[-1] == 7 and len(stream.tokens) == OPTIONS.max_tokens for stream in streams)
        assert any(0 in stream.versions for stream in streams)
        new.check(prompts, built.generate(ids, OPTIONS, media=media))
        # What was cancelled leaves nothing behind.
        one = built.submit(ids[0], OPTIONS, media=media[0])
        built.step()
        built.cancel(one.id)
        assert not built._lm.media._items


@pytest.mark.parametrize("ended", [[0], *(pytest.param(e, marks=pytest.mark.slow) for e in ([0, 1, 2], [1, 2]))], ids=str)
def test_completions_that_are_cancelled_in_the_middle_of_a_prompt(
    ended: list[int], tmp_path: Path, process_group: None
) -> None:
    """The others of the prompt, and other requests, go on."""
    family = "qwen2_5_vl"
    folder = save(tmp_path / "model", family)
    prompts = [document(family, 3, 2, 1), document(family, 2), document(family, 1, 1)]
    media = media_of(prompts)
    with generator_of(folder, "continuous", target_tokens_per_batch=8) as built:
        streams = [built.submit(prompts[0][0], OPTIONS, row=0, sample=i, media=media[0]) for i in range(3)]
        others = [built.submit(ids, OPTIONS, media=fields) for (ids, _), fields in zip(prompts[1:], media[1:], strict=True)]
        built.step()
        assert not any(stream.tokens for stream in streams)
        for i in ended:
            built.cancel(streams[i].id)
        while built.step():
            pass
        left = [stream for i, stream in enumerate(streams) if i not in ended]
        assert all(len(stream.tokens) == OPTIONS.max_tokens for stream in [*left, *others])
        assert not built._lm.media._items
    completions = [[stream.result() for stream in left], *([stream.result()] for stream in others)]
    Actor(folder).check(prompts, completions)


def test_numbers_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With new weights, when no request is left."""
    folder = save(tmp_path / "model", "qwen2_5_vl")
    first, second = document("qwen2_5_vl", 1, 1), document("qwen2_5_vl", 3, 1)
    monkeypatch.setattr("drivetrain.generation.media.MOST_NUMBERS", 256 + 6)
    with generator_of(folder, "static") as built:
        weights = list(built._lm.model.state_dict().items())
        built.generate([first[0]], OPTIONS, media=media_of([first]))
        for _ in range(2):
            with pytest.raises(ConfigError, match="more distinct media since its last weights than there are ids"):
                built.submit(second[0], OPTIONS, media=second[1][0])
        built.generate([first[0]], OPTIONS, media=media_of([first]))
        names = DiskLayout(built._lm.model)
        built.load_weights([(names.renamed(name), value.clone()) for name, value in weights])
        built.generate([second[0]], OPTIONS, media=media_of([second]))


def test_media_that_do_not_fit_are_refused(tmp_path: Path, process_group: None) -> None:
    folder = save(tmp_path / "model", "qwen2_5_vl")
    ids, items = document("qwen2_5_vl", 1, 1)
    fields = items[0]
    with generator_of(folder, "static") as built:
        for prompt, media, message in (
            ([5, 6, 7], fields, "the prompt has 0 image tokens .* but 1 images"),
            (ids, {"pixel_values": fields["pixel_values"]}, "pixel_values without image_grid_thw"),
            (ids, {**fields, "audio": fields["pixel_values"]}, "the media field 'audio'"),
            ([*ids, IMAGE], fields, "5 image tokens"),
            ([], fields, "0 tokens"),
            # Beside an image of another request.
            ([5, IMAGE, 7], {}, "1 image tokens .* but 0 images"),
        ):
            with pytest.raises(ConfigError, match=message):
                built.submit(prompt, OPTIONS, media=media)
        with pytest.raises(ConfigError, match="images and media"):
            built.submit(ids, OPTIONS, media=fields, images=["data:image/png;base64,"])
        assert not built._lm.media._items
        # Text alone.
        assert len(built.generate([[5, 6, 7]], OPTIONS)[0]) == OPTIONS.samples
    with generator_of(save(tmp_path / "text", "qwen3"), "static") as built:
        with pytest.raises(ConfigError, match=r"the prompt has media, but .*text does not accept any"):
            built.submit(ids, OPTIONS, media=fields)
        with pytest.raises(ConfigError, match="does not accept images"):
            built.submit(ids, OPTIONS, images=["data:image/png;base64,"])
    ids, items = document("gemma4", 1, 1, kind="audio")
    with generator_of(save(tmp_path / "audio", "gemma4"), "static") as built:
        audio = built.generate([ids], OPTIONS, media=items)
    Actor(tmp_path / "audio").check([(ids, items)], audio)
    ids, items = document("gemma3", 1, 1)
    with (
        generator_of(save(tmp_path / "both", "gemma3"), "static") as built,
        pytest.raises(ConfigError, match="attend to each other in both directions"),
    ):
        built.submit(ids, OPTIONS, media=items[0])


@pytest.mark.parametrize(
    ("family", "generator"),
    [("qwen2_5_vl", "static"), ("qwen3_vl", "continuous"), pytest.param("smolvlm", "static", marks=pytest.mark.slow)],
)
def test_images_of_requests(family: str, generator: str, tmp_path: Path, process_group: None) -> None:
    """As a service has them: data URIs, and one placeholder for each in the prompt."""
    folder = save_media_model(tmp_path / "model", family)
    uris = [data_uri(png(24, 16)), data_uri(png(16, 32, seed=1))]
    with generator_of(folder, generator) as built:
        processor = PROCESSORS[family](built.config.model, built._lm._whole, load_tokenizer(built.config.model))
        (mark,) = load_tokenizer(built.config.model)(processor.placeholder("image"))["input_ids"][-1:]
        stream = built.submit([5, mark, 7, mark, 9], OPTIONS, images=uris)
        while built.step():
            pass
        sources = [read_source("image", uri, OVER_NETWORK) for uri in uris]
        items = [dict(processor.process(source, MediaLimits()).fields) for source in sources]
        for prompt, images, message in (
            ([5, mark, 7], uris, "the prompt has 1 image tokens .* for 2 images"),
            ([5, mark], ["data:image/png;base64,AAAA"], "image 0: "),
            ([5, mark], ["file:///etc/passwd"], "image 0: "),
        ):
            with pytest.raises(ConfigError, match=message):
                built.submit(prompt, OPTIONS, images=images)
    Actor(folder).check([(stream.prompt, items)], [[stream.result()]])
