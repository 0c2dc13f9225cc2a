"""Recipes of the tinker-cookbook, unmodified, in a Python environment of their own, trained by the service (make test-tinker).

Their model names and data sets are folders of these names in the directory that they run in.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from helpers.tinker_process import TinkerProcess

tinker = pytest.importorskip("tinker", reason="the client of Tinker's protocol is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker-cookbook" / "bin" / "python"
NAME = "Qwen/Qwen3-8B"
"""A name that the recipes know a chat format for."""
KEY = "tml-a-key-of-a-test"
WORDS = ("cat", "dog", "sun", "moon", "tree", "river")
SPLITS = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
RUNS: dict[str, list[str]] = {
    "sl_loop": ["max_steps=4", "learning_rate=1e-3"],
    "rl_loop": ["batch_size=8", "group_size=4", "max_tokens=8", "max_steps=2"],
    "preference.dpo.train": ["batch_size=32", "max_steps=4", "learning_rate=1e-3"],
    "distillation.on_policy_distillation": [
        f"teacher_model={NAME}",
        "dataset=deepmath",
        "groups_per_batch=8",
        "group_size=2",
        "max_tokens=16",
        "lora_rank=8",
    ],
    # Its evaluation does not work in this version of the cookbook, with any service.
    "sdft.train": [
        "eval_every=0",
        "groups_per_batch=8",
        "max_tokens=12",
        "max_steps=3",
        "topk=5",
        "learning_rate=1e-3",
        "lora_rank=8",
    ],
}


def save_model(folder: Path) -> None:
    """A small model with a token for each byte, and those of the chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def write_rows(folder: Path, **splits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_data(root: Path) -> None:
    """Rows in the form of the data sets that the recipes load."""
    random = Random(0)

    def chat() -> dict[str, Any]:
        said = [
            {"role": "user", "content": f"Say {random.choice(WORDS)}."},
            {"role": "assistant", "content": random.choice(WORDS)},
        ]
        return {"prompt": "p", "prompt_id": "0", "category": "c", "messages": said}

    def sum_of_two() -> dict[str, Any]:
        a, b = random.randrange(50), random.randrange(50)
        return {"question": f"Tom has {a} apples and buys {b}. How many?", "answer": f"{a}+{b} #### {a + b}"}

    def pair() -> dict[str, Any]:
        prompt = f"\n\nHuman: Say {random.choice(WORDS)}.\n\nAssistant: "
        return {"chosen": f"{prompt}Sure: {random.choice(WORDS)}", "rejected": f"{prompt}No {random.choice(WORDS)}."}

    def choice() -> dict[str, Any]:
        choices = {"label": ["A", "B"], "text": random.sample(WORDS, 2)}
        row = {"question": "Which one?", "choices": choices, "answerKey": "A", "domain": "Chemistry", "type": "mcq-2-choices"}
        return {**row, "details": {"level": "L3"}}

    write_rows(root / "HuggingFaceH4/no_robots", train=[chat() for _ in range(640)], test=[chat() for _ in range(256)])
    write_rows(root / "openai/gsm8k", train=[sum_of_two() for _ in range(64)])
    (root / "openai/gsm8k/README.md").write_text(SPLITS)
    write_rows(root / "Anthropic/hh-rlhf", train=[pair() for _ in range(400)], test=[pair() for _ in range(32)])
    write_rows(root / "zwhe99/DeepMath-103K", train=[{"question": f"What is {n} + 1?"} for n in range(64)])
    write_rows(root / "hicai-zju/SciKnowEval", test=[choice() for _ in range(60)])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    save_model(folder / NAME)
    save_data(folder)
    return folder


@pytest.fixture(scope="module")
def running(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    if not PYTHON.exists():
        pytest.skip("there is no .venv-tinker-cookbook; make setup-tinker builds it")
    process = TinkerProcess(root / NAME, tmp_path_factory.mktemp("state"), name=NAME)
    try:
        yield process
    finally:
        process.kill()


def run_recipe(service: TinkerProcess, root: Path, recipe: str, *words: str) -> list[dict[str, Any]]:
    """Run a recipe as its documentation has it; return what it logged."""
    log = root / "logs" / recipe
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": service.url, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [str(PYTHON), "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_of_the_cookbook(running: TinkerProcess, root: Path, recipe: str) -> None:
    rows = run_recipe(running, root, recipe, f"model_name={NAME}", *RUNS[recipe])

    def values(name: str) -> list[float]:
        return [row[name] for row in rows if name in row]

    if recipe == "sl_loop":
        losses = values("train_mean_nll")
        assert len(losses) == 4
        assert losses[-1] < losses[0]
    elif recipe == "preference.dpo.train":
        losses = values("dpo_loss")
        # The policy begins as its reference: log 2.
        assert losses[0] == pytest.approx(0.6931472, abs=1e-5)
        assert losses[-1] < losses[0]
    elif recipe == "distillation.on_policy_distillation":
        # The teacher is the model that the student begins as: samples and scores have the same log-probabilities.
        assert abs(values("teacher_kl")[0]) < 1e-4
    assert len(rows) >= 2


def test_reinforcement_learning_on_arithmetic_learns(running: TinkerProcess, root: Path) -> None:
    """From a model that was taught to answer with a number now and then, until it does so more often."""
    holder = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    training = holder.create_lora_training_client(base_model=NAME, rank=32, seed=0).result()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / NAME)
    random = Random(0)

    def example() -> Any:
        a, b, c = random.randrange(100), random.randrange(100), random.randrange(200)
        asked = f"User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {a} + {b}?\n\nAssistant:"
        prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (asked, f" {c}\n\nUser:"))
        tokens, weights = prompt + answer, [0.0] * (len(prompt) - 1) + [1 / 32 / len(answer)] * len(answer)
        inputs = {
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(weights)]),
            "weights": tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)]),
        }
        return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    for _ in range(200):
        passed = training.forward_backward([example() for _ in range(32)], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=3e-3))
        if passed.result().metrics["loss:sum"] < 0.8:
            break
    path = training.save_state("taught").result().path
    words = ["env=arithmetic", f"model_name={NAME}", "renderer_name=role_colon", "group_size=16", "groups_per_batch=8"]
    words += ["learning_rate=1e-3", "max_tokens=12", "lora_rank=32", f"load_checkpoint_path={path}", "save_every=20"]
    for steps in (20, 40, 60, 80, 100):
        more = [f"max_steps={steps}", "behavior_if_log_dir_exists=resume"]
        rows = [row for row in run_recipe(running, root, "math_rl.train", *words, *more) if "env/all/format" in row]
        first, last = (
            [sum(row[f"env/all/{name}"] for row in part) / len(part) for name in ("format", "reward/total")]
            for part in (rows[:4], rows[-4:])
        )
        if last[0] > first[0] + 0.2:
            break
    assert last[0] > first[0] + 0.2
    assert last[1] > first[1]
