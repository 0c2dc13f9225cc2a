"""The built-in toy task with images: how many shapes of which color and form are in an image of 32 x 32 pixels.

A tiny vision-language model is trained on chats, some of which have no image and ask for a sum, or with rewards for correct numbers.
Everything is generated from a seed, and no image of the evaluation or test split is in the training split.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE = 32
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (240, 220, 60)}
FORMS = {"square": "squares", "disc": "discs", "cross": "crosses"}
"""The forms, and their plurals."""
MOST = 4
"""The maximum number of shapes."""
CELLS = [(x, y) for y in range(3) for x in range(3)]
"""The cells for shapes, of 10 x 10 pixels each."""
COUNTS = {"test": 400, "eval": 200, "train": 6000}
"""The number of images per split."""
SUMS = 3
"""One in this many rows is a sum, without an image."""
QUESTION = "what is in it"
WORDS = ["<pad>", "<end>", "<user>", "<assistant>", "<start>", "<image>", "<video>", "<stop>"]
"""The special tokens."""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<start><image><stop>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """Return an image and its description."""
    count, color, form = rng.randint(1, MOST), rng.choice(list(COLORS)), rng.choice(list(FORMS))
    image = Image.new("RGB", (SIDE, SIDE), (rng.randint(0, 40),) * 3)
    canvas = ImageDraw.Draw(image)
    for x, y in rng.sample(CELLS, count):
        left, top, size = 10 * x + rng.randint(1, 3), 10 * y + rng.randint(1, 3), rng.randint(6, 7)
        box = (left, top, left + size - 1, top + size - 1)
        if form == "square":
            canvas.rectangle(box, fill=COLORS[color])
        elif form == "disc":
            canvas.ellipse(box, fill=COLORS[color])
        else:
            canvas.line(box, fill=COLORS[color], width=2)
            canvas.line((box[2], box[1], box[0], box[3]), fill=COLORS[color], width=2)
    return image, f"{count} {color} {FORMS[form] if count > 1 else form}"


def write_shapes(folder: Path, seed: int, counts: Mapping[str, int] = COUNTS) -> None:
    """Write two jsonl files, with chats and with prompts, and a folder of images, for each split.

    The answer to a prompt in `NAME-prompts.jsonl` is only a number: that of the shapes, or the sum.

    Args:
        folder: The folder.
        seed: The seed.
        counts: The number of images of each split, by name.
    """
    rng = random.Random(seed)
    drawn: set[bytes] = set()
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        with open(folder / f"{name}.jsonl", "w") as file, open(folder / f"{name}-prompts.jsonl", "w") as prompts:
            number = 0
            while number < count:
                image, answer = draw(rng)
                # Across all splits, so that no held-out image was trained on.
                if image.tobytes() in drawn:
                    continue
                drawn.add(image.tobytes())
                image.save(folder / name / f"{number}.png")
                parts = [{"type": "image", "image": f"{name}/{number}.png"}, {"type": "text", "text": QUESTION}]
                file.write(_row(parts, answer))
                prompts.write(_prompt(parts, answer.split()[0]))
                number += 1
                if number % SUMS == 0:
                    a, b = rng.randint(1, MOST), rng.randint(1, MOST)
                    file.write(_row(f"{a} and {b}", str(a + b)))
                    prompts.write(_prompt(f"{a} and {b}", str(a + b)))


def _row(question: Any, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def _prompt(question: Any, answer: str) -> str:
    return json.dumps({"prompt": [{"role": "user", "content": question}], "answer": answer}) + "\n"


def make_tokenizer() -> Any:
    """Build a tokenizer with one token per word, and a chat template."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    forms = [word for pair in FORMS.items() for word in pair]
    words = [*WORDS, " ", *"0123456789", *COLORS, *forms, *QUESTION.split(), "and"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("[a-z]+|."), "isolated")
    tokenizer.decoder = Fuse()
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", additional_special_tokens=WORDS[2:]
    )
    fast.chat_template = TEMPLATE
    return fast


def write_vision_model(folder: Path, seed: int) -> None:
    """Write an untrained Qwen2.5-VL-type model of 0.5 million parameters, with its processor and tokenizer, in Hugging Face format."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tokenizer()
    ids = {word: WORDS.index(word) for word in WORDS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 32,
            "fullatt_block_indexes": [0, 1],
        },
        # Tokens that the model's code looks for, under the names of this vocabulary.
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        vision_start_token_id=ids["<start>"],
        vision_end_token_id=ids["<stop>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": SIDE * SIDE}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "size": size}) + "\n")


def shapes_accuracy(model_folder: Path, data: Path, *, show: int = 0, page: Path | None = None) -> float:
    """Compute the fraction of exact answers about images with greedy decoding, in plain transformers.

    Args:
        model_folder: The folder of the model in Hugging Face format.
        data: A jsonl file written by `write_shapes`.
        show: The number of questions to print with their answers.
        page: A PNG file for images with the model's answers; None for none.
    """
    import torch
    from transformers import AutoImageProcessor, AutoModelForMultimodalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    processor: Any = AutoImageProcessor.from_pretrained(model_folder, backend="pil")
    model: Any = AutoModelForMultimodalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    rows = [row for row in rows if isinstance(row[0]["content"], list)]
    images = [Image.open(data.parent / row[0]["content"][0]["image"]).convert("RGB") for row in rows]
    expected = [row[1]["content"] for row in rows]
    # All rows with an image ask the same question.
    (text,) = {str(tokenizer.apply_chat_template(row[:1], tokenize=False, add_generation_prompt=True)) for row in rows}
    answers: list[str] = []
    for start in range(0, len(rows), 100):
        fields = processor(images=images[start : start + 100], return_tensors="pt")
        # The model merges 2 x 2 patches into one token.
        (tokens,) = {int(grid.prod()) // 4 for grid in fields["image_grid_thw"]}
        # All images have the same size, so the prompts have equal tokens.
        ids = torch.tensor(
            [tokenizer(text.replace("<image>", "<image>" * tokens))["input_ids"]] * len(fields["image_grid_thw"])
        )
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            made = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                max_new_tokens=8,
                do_sample=False,
                **fields,
            )
        answers += tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    for answer, want in list(zip(answers, expected, strict=True))[:show]:
        print(f"{data.stem}: {answer!r}, {'right' if answer == want else f'but it is {want!r}'}")
    if page is not None:
        draw_page(page, images[:20], answers[:20], expected[:20])
    return sum(answer == want for answer, want in zip(answers, expected, strict=True)) / len(rows)


def draw_page(file: Path, images: list[Image.Image], answers: list[str], expected: list[str]) -> None:
    """Draw images with their answers, wrong ones in red."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(images) // 5)
    figure = Figure(figsize=(9, 2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, image, answer, want in zip(figure.subplots(rows, 5).flat, images, answers, expected, strict=True):
        axes.imshow(image)
        axes.set_title(answer, fontsize=9, color="black" if answer == want else "red")
        axes.axis("off")
    figure.savefig(file, dpi=100, format="png")
