"""Write what depends on the registered losses into the pages: `python -m docs.algorithms`.

The tables of algorithms, objectives and estimators in `rl.md`, that of losses of pairs in `dpo.md`, and the number of algorithms in the README.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from drivetrain.losses.algorithms import ALGORITHMS, AlgorithmSpec
from drivetrain.losses.estimators.base import ESTIMATORS
from drivetrain.losses.objectives.base import OBJECTIVES
from drivetrain.losses.pair_losses.base import PAIR_LOSSES
from drivetrain.losses.registry import LossRegistry
from drivetrain.trainers.config.parse import RECIPES

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "rl.md", ROOT / "README.md"
PAIRS = ROOT / "docs" / "dpo.md"
NAMED = ("grpo", "dapo", "gspo", "rloo", "ppo", "online_dpo")
"""The algorithms that the README names."""


def linked(paper: str) -> str:
    """Return a paper with its arXiv number as a link."""
    return re.sub(r"arXiv:([\d.]+\d)", r"[arXiv:\1](https://arxiv.org/abs/\1)", paper)


def recipe_of(algorithm: str) -> str:
    """Return the simplest built-in recipe of an algorithm, in backquotes; empty if it has none."""
    names = [
        path.stem
        for path in RECIPES.glob("*.yaml")
        if (yaml.safe_load(path.read_text()).get("rl") or {}).get("algorithm") == algorithm
    ]
    return f"`{min(names, key=lambda name: (len(name), name))}`" if names else ""


def advantages(spec: AlgorithmSpec) -> str:
    """Return what an algorithm's advantages are."""
    if spec.advantage is None:
        return "none"
    kind = ESTIMATORS.get(spec.advantage.get("estimator", "gae"))
    parts = [f"`{kind.name}`"]
    parts += [
        f"`{name}={str(value).lower()}`" for name, value in spec.advantage.items() if name not in ("estimator", "kl_coef")
    ]
    parts += [f"KL {spec.advantage['kl_coef']} in the reward"] if "kl_coef" in spec.advantage else []
    parts += ["groups of equal rewards are replaced (`rl.dynamic_sampling`)"] if spec.dynamic_sampling else []
    return "; ".join(parts)


def algorithms_table() -> str:
    """Return the table of algorithms."""
    lines = ["| `rl.algorithm` | recipe | loss | advantages | paper |", "|---|---|---|---|---|"]
    for name, spec in ALGORITHMS.all().items():
        loss = spec.summary or OBJECTIVES.get((spec.loss or {}).get("objective", "clipped")).summary
        lines.append(f"| `{name}` | {recipe_of(name)} | {loss} | {advantages(spec)} | {linked(spec.paper)} |")
    return "\n".join(lines)


def choices_table(registry: LossRegistry[Any], section: str) -> str:
    """Return the table of a registry's objectives or estimators.

    Args:
        registry: The registry.
        section: The section of their settings.
    """
    lines = [f"| `{section}.{registry.kind}` | what it computes | settings | paper |", "|---|---|---|---|"]
    for name, kind in registry.all().items():
        settings = ", ".join(f"`{f.name}`" for f in fields(kind))
        lines.append(f"| `{name}` | {kind.summary} | {settings} | {linked(kind.paper)} |")
    return "\n".join(lines)


def pairs_table() -> str:
    """Return the table of losses of pairs, with that of single answers."""
    lines = ["| `dpo.loss` | loss of a pair | further settings | paper |", "|---|---|---|---|"]
    for name, spec in PAIR_LOSSES.all().items():
        settings = ", ".join(f"`{setting}`" for setting in sorted(spec.reads))
        lines.append(f"| `{name}` | {spec.summary} | {settings} | {linked(spec.paper)} |")
    paper = linked("Ethayarajh et al. 2024, arXiv:2402.01306")
    lines.append(f"| `kto` | of one answer: w (1 - s(± beta (r - z0))) | `desirable_weight`, `undesirable_weight` | {paper} |")
    return "\n".join(lines)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with the text between each pair of markers replaced.

    Args:
        text: The page.
        parts: The name of the markers, and what belongs between them.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        before, marker, after = text.partition(begin)
        assert marker, name
        text = f"{before}{begin}{part}{end}{after.partition(end)[2]}"
    return text


def pages() -> dict[Path, str]:
    """Return the pages with what is generated in them."""
    tables = {
        "algorithms": algorithms_table(),
        "objectives": choices_table(OBJECTIVES, "rl.loss"),
        "estimators": choices_table(ESTIMATORS, "rl.advantage"),
    }
    return {
        PAGE: filled(PAGE.read_text(), {name: f"\n\n{table}\n\n" for name, table in tables.items()}),
        PAIRS: filled(PAIRS.read_text(), {"losses of pairs": f"\n\n{pairs_table()}\n\n"}),
        README: filled(README.read_text(), {"other algorithms": str(len(ALGORITHMS.all().keys() - set(NAMED)))}),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
