"""Folders of tiny models that take media, with processors and a tokenizer of single characters, and media to give them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from drivetrain.engine.tiny_media import AUDIO, END, IMAGE, START, VIDEO, VOCABULARY, tiny_media_config

NAMES = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image|>", "<|image>", "<image|>"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
    "idefics3": ("<image>", "<|vision_start|>", "<|vision_end|>"),
    "smolvlm": ("<image>", "<|vision_start|>", "<|vision_end|>"),
}
"""The tokens of an image, of what stands before it, and behind it; those of Qwen if not named."""
AUDIO_ALONE = ("qwen2_audio", "glmasr")
QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
_TILES = ["<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5))]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% elif p.type == 'video' %}VIDEO{% elif p.type == 'audio' %}AUDIO{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>{% endgeneration %}"
    "{% elif m.content is string %}{{ m.content }}<end>{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% elif p.type == 'video' %}VIDEO{% elif p.type == 'audio' %}AUDIO{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "min_patches": 1,
        "max_patches": 4,
    },
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    },
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}


def media_tokenizer(family: str, template: str = TEMPLATE) -> Any:
    """A tokenizer with one token per character, and those of a family's media."""
    image, start, end = NAMES.get(family, QWEN)
    special = {0: "<pad>", 1: "<bos>", 2: "<end>", IMAGE: image, VIDEO: "<|video_pad|>", AUDIO: "<|AUDIO|>"}
    special |= {START: start, END: end, 246: "<|audio_bos|>", 247: "<|audio_eos|>"}
    roles = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    characters = ["\n", *map(chr, range(32, 127))]
    rest = iter([*roles, *characters, *_TILES, *(f"<unused{i}>" for i in range(VOCABULARY))])
    words = [special.get(i) or next(rest) for i in range(VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=[*(w for i, w in special.items() if i not in (0, 2)), *roles, *_TILES],
    )
    marks = {"IMAGE": image if family in NAMES else f"{start}{image}{end}", "VIDEO": f"{start}<|video_pad|>{end}"}
    marks["AUDIO"] = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    if family == "gemma3":
        marks["IMAGE"] = start
    if family == "gemma4":
        # Its processor writes what stands around an item.
        marks |= {"VIDEO": "<|video_pad|>", "AUDIO": "<|AUDIO|>"}
    for mark, text in marks.items():
        template = template.replace(mark, text)
    fast.chat_template = template
    return fast


def save_processors(folder: Path, family: str, template: str = TEMPLATE) -> Path:
    """Write a folder with the config, the processors and the tokenizer of a tiny model, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_media_config(family).save_pretrained(folder)
    media_tokenizer(family, template).save_pretrained(folder)
    settings: dict[str, Any] = {} if family in AUDIO_ALONE else dict(IMAGES.get(family, _QWEN_IMAGES))
    if family == "gemma4":
        # 20 frames of 0.05 s for each second, 16 mel bins.
        settings |= {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16, "sampling_rate": 2000}
        settings |= {"frame_length_ms": 50.0, "hop_length_ms": 50.0, "max_frequency": 1000.0}
    if family in (*AUDIO_ALONE, "qwen2_5_omni_thinker"):
        # 20 frames of 0.02 s for each second of the encoder, 16 mel bins.
        settings |= {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": 2000}
        settings |= {"hop_length": 100, "n_fft": 200, "chunk_length": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if family.startswith("qwen") and family != "qwen2_audio":
        video = {**_QWEN_IMAGES, "size": {"shortest_edge": 64, "longest_edge": 512}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(width: int = 24, height: int = 16, seed: int = 0, **options: Any) -> bytes:
    """The content of a file with a random picture."""
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    """A data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def movie(frames: int, *, fps: int = 10, width: int = 48, height: int = 32) -> bytes:
    """The content of a video file whose frames become brighter, 8 levels each."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), i * 8 % 256, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def tone(seconds: float, rate: int = 8000) -> NDArray[np.float32]:
    """A sine of 100 Hz."""
    return (0.5 * np.sin(np.arange(int(seconds * rate)) / rate * 2 * np.pi * 100)).astype(np.float32)


def wav(seconds: float, rate: int = 8000) -> bytes:
    """The content of a wav file with a sine of 100 Hz."""
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((tone(seconds, rate) * 32767).astype(np.int16).tobytes())
    return buffer.getvalue()


def save_media_model(folder: Path, family: str) -> Path:
    """Write a tiny model with its weights, processors and tokenizer."""
    import torch
    from transformers import AutoModelForMultimodalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(tiny_media_config(family), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return save_processors(folder, family)
