"""Objectives, estimators, algorithms and losses of pairs are each registered in one place: one more is one more file."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.algorithms import NAMED, pages
from drivetrain.engine.errors import ConfigError
from drivetrain.losses.algorithms import ALGORITHMS
from drivetrain.losses.objectives.base import OBJECTIVES
from drivetrain.losses.objectives.clipped import ClippedObjective
from helpers.search_path import python_path

ROOT = Path(__file__).parents[2]
EXAMPLE = re.search(r"### Write your own algorithm.*?```python\n(.*?)```", (ROOT / "docs" / "rl.md").read_text(), re.DOTALL)
ESTIMATOR = '''
"""Estimators for a test."""

from dataclasses import dataclass

from ...engine.config import setting
from ..algorithms import algorithm
from .base import Estimator, estimator


@estimator("halves", "a share of the reward less the mean of the group", paper="unpublished")
@dataclass(frozen=True, kw_only=True)
class HalvesEstimator(Estimator):
    """A share of `losses.advantages.grpo`."""

    part: float = setting(0.5, "the share of the advantage that is used")

    def estimate(self, x):
        from ..advantages import grpo

        return self.part * grpo(x.rewards(), x.groups(), scale=False), None


algorithm("by_halves", summary="PPO's", paper="unpublished", loss={"dual_clip": None}, advantage={"estimator": "halves"})
'''
PAIRS = '''
"""A loss of pairs for a test."""

from drivetrain.losses.pair_losses.base import pair_loss


@pair_loss("linear", "-beta m", paper="unpublished", reads=("divergence",))
def linear(s, x):
    return -s.beta * x.margin
'''
OF_PAIRS = """
from drivetrain.losses.preference import PreferenceLoss
from drivetrain.trainers.config.methods import PreferenceConfig
from drivetrain.trainers.methods.preference import preference_loss

settings = PreferenceConfig(loss="linear", beta=0.5, divergence="forward_kl")
settings.check()
loss = preference_loss(settings)
assert loss.needs_reference
fields = {"chosen": [1.0, 0.0], "reference_log_probs": [-1.0, -1.0]}
batch = from_lists([[1, 2], [1, 3]], supervised=[[False, True]] * 2, group_ids=[0, 0], sequence_fields=fields)
outputs = TokenOutputs(mask=loss.tokens(batch), log_probs=torch.tensor([-0.5, 0.0, -2.0, 0.0]))
found["pairs"] = {"loss": float(loss(outputs, batch).terms["preference"]), "page": pages()[PAIRS]}
print(json.dumps(found))
"""
READ = """
import json, sys
from docs.algorithms import PAGE, PAIRS, README, pages
from drivetrain.trainers.config.parse import help_text, parse
from drivetrain.trainers.config.rl import GRPOConfig

configs = [parse(GRPOConfig, ["model.path=/tmp", "data.train=[x.jsonl]", "rewards.use=[answer]", *words]) for words in json.loads(sys.argv[1])]
for config in configs:
    config.check()
found = {"help": help_text(GRPOConfig, ""), "page": pages()[PAGE], "readme": pages()[README], "runs": []}
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()

import torch
from drivetrain.engine.loss import TokenOutputs
from drivetrain.engine.packing.convert import from_lists
from drivetrain.trainers.rl.algorithms import resolve
from drivetrain.workers.protocol.names import Names, collect
from drivetrain.workers.protocol.values import _value, _Writer
from drivetrain.workers.roles.advantage import AdvantageWorker

for config in configs:
    algorithm = resolve(config)
    parts = (algorithm.loss, algorithm.advantage)
    assert not collect(parts)
    sent = _Writer(Names(), None, copy=True)
    loss, advantage = (_value(sent.plain(part, "part"), [], Names()) for part in parts)
    assert (loss, advantage) == parts
    batch = from_lists([[1, 2], [3, 4]], supervised=[[False, True]] * 2, group_ids=[7, 7])
    batch = batch.with_sequence_fields(rewards=torch.tensor([3.0, 1.0]))
    batch = batch.with_fields(**AdvantageWorker(advantage).initialize().compute_advantages(batch))
    batch = batch.with_fields(old_log_probs=torch.tensor([-1.0, 0.0, -1.0, 0.0]), reference_log_probs=torch.zeros(4))
    mask = loss.tokens(batch)
    log_probs = torch.tensor([-0.5, 0.0, -1.5, 0.0], requires_grad=True)
    total = loss(TokenOutputs(mask=mask, log_probs=log_probs), batch).terms["policy"] / loss.weights(batch)["policy"]
    total.backward()
    numbers = {"loss": float(total.detach()), "gradient": log_probs.grad.tolist()}
    found["runs"].append({"text": algorithm.loss_text, "advantages": batch.token_fields["advantages"].tolist(), **numbers})
print(json.dumps(found))
"""


def run(code: str, *words: str, path: Path) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": python_path(path)}
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def read(path: Path, *runs: list[str], more: str = "") -> dict[str, Any]:
    """What a program says, with what is in a folder, of its settings, and of runs with some of them."""
    done = run(READ + more, json.dumps(runs), path=path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def with_entry_point(folder: Path, module: str, text: str) -> Path:
    """A folder in which a package with one module is installed."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.losses]\n{module} = {module}\n")
    return folder


def with_file(folder: Path, name: str, text: str) -> Path:
    """A folder with this checkout, as links, and one more file in it."""
    package, place = folder / "drivetrain", Path(name).parts
    inside = package.joinpath(*place[:-1])
    inside.mkdir(parents=True)
    for real, here in ((ROOT, package), (ROOT / place[0], package / place[0]), (ROOT.joinpath(*place[:-1]), inside)):
        for entry in real.iterdir():
            if not (here / entry.name).exists() and not entry.name.startswith(".") and entry.name != "__pycache__":
                (here / entry.name).symlink_to(entry)
    (package / name).write_text(text)
    return folder


@pytest.mark.slow
def test_an_objective_is_one_file_which_an_entry_point_names(tmp_path: Path) -> None:
    assert EXAMPLE is not None
    path = with_entry_point(tmp_path, "tanh", EXAMPLE[1])
    found = read(
        path, ["rl.algorithm=tanh_grpo", "rl.loss.sharpness=4"], ["rl.algorithm=tanh_grpo"], ["rl.loss.objective=tanh"]
    )
    assert "tanh: how soon the gradient fades" in found["help"]
    assert " | tanh_grpo) (default: grpo)" in found["help"]
    assert "| `tanh_grpo` |  | the ratio through a hyperbolic tangent | `grpo` | unpublished |" in found["page"]
    assert "| `tanh` | the ratio through a hyperbolic tangent | `sharpness` | unpublished |" in found["page"]
    assert f"{len(ALGORITHMS.all()) - len(NAMED) + 1}<!-- end --> others" in found["readme"]
    changed, algorithm, objective = found["runs"]
    assert changed["text"] == "objective=tanh, aggregation=token-mean, sharpness=4.0"
    assert algorithm["text"] == "objective=tanh, aggregation=token-mean, sharpness=3.0"
    assert objective["text"] == "objective=tanh, aggregation=seq-mean-token-mean, kl_coef=0.04"
    for s, got in zip((4.0, 3.0, 2.0), found["runs"], strict=True):
        each = [-sign / math.sqrt(2) * math.tanh(s * (math.exp(sign * 0.5) - 1)) / s for sign in (1, -1)]
        assert got["loss"] == pytest.approx(sum(each) / 2, rel=1e-4)


@pytest.mark.slow
def test_an_estimator_and_a_loss_of_pairs_are_one_file_each(tmp_path: Path) -> None:
    path = with_file(with_entry_point(tmp_path, "linear", PAIRS), "losses/estimators/halves.py", ESTIMATOR)
    found = read(path, ["rl.algorithm=by_halves"], ["rl.advantage.estimator=halves", "rl.advantage.part=0.25"], more=OF_PAIRS)
    assert "halves: the share of the advantage that is used" in found["help"]
    assert "| `by_halves` |  | PPO's | `halves` | unpublished |" in found["page"]
    assert "| `halves` | a share of the reward less the mean of the group | `part` | unpublished |" in found["page"]
    assert [got["advantages"] for got in found["runs"]] == [[0.5, 0.0, -0.5, 0.0], [0.25, 0.0, -0.25, 0.0]]
    assert "ipo | linear | nca_pair" in found["help"]
    assert "hinge, ipo, linear, robust, sigmoid" in found["help"]
    assert "| `linear` | -beta m | `divergence` | unpublished |" in found["pairs"]["page"]
    assert found["pairs"]["loss"] == pytest.approx(-0.5 * ((1 - math.exp(-0.5)) - (1 - math.exp(1.0))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rl.algorithm=tanh_grpo"], r"rl\.algorithm=tanh_grpo; it must be one of cispo"),
        (["rl.loss.objective=tanh"], r"rl\.loss\.objective=tanh; it must be one of cispo"),
        (["rl.loss.sharpness=4"], r"unknown setting 'rl\.loss\.sharpness'"),
        (["dpo.loss=linear"], r"dpo\.loss=linear; it must be one of aot"),
        (["rl.advantage.part=0.5"], r"unknown setting 'rl\.advantage\.part'"),
    ],
)
def test_what_is_not_registered_is_unknown(words: list[str], message: str) -> None:
    from drivetrain.trainers.config.parse import parse
    from drivetrain.trainers.config.rl import GRPOConfig

    with pytest.raises(ConfigError, match=message):
        parse(GRPOConfig, words)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"tanh",', '"clipped",', "two registrations of objective=clipped"),
        ('"tanh_grpo",', '"grpo",', "two registrations of algorithm=grpo"),
        ("sharpness: float", "clip_low: int", "the setting clip_low of objective=tanh has another type elsewhere"),
        ("sharpness: float", "kl_coef: float", "the setting kl_coef of objective=tanh is one of PolicyLossConfig itself"),
        ("from dataclasses", "from no_such_module", "entry point tanh = tanh of group drivetrain.losses cannot be imported"),
    ],
)
def test_a_registration_that_contradicts_another_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert EXAMPLE is not None
    path = with_entry_point(tmp_path, "tanh", EXAMPLE[1].replace(old, new))
    done = run("import drivetrain.trainers.config.rl", path=path)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_late_registration_is_refused() -> None:
    assert "clipped" in OBJECTIVES.all()
    with pytest.raises(ConfigError, match=r"objective=late is registered after .* group drivetrain\.losses"):
        OBJECTIVES.add("late", ClippedObjective)


def test_the_pages_are_current() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is not what the registrations say; run python -m docs.algorithms"
