"""Write what depends on the registered losses into the pages: `python -m docs.algorithms`.

The tables of algorithms, objectives and estimators in `rl.md`, that of losses of pairs in `dpo.md`, those of papers in `papers.md`, and the number
of algorithms in the README.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from drivetrain.commands import COMMANDS
from drivetrain.losses.algorithms import ALGORITHMS, AlgorithmSpec
from drivetrain.losses.estimators.base import ESTIMATORS
from drivetrain.losses.objectives.base import OBJECTIVES
from drivetrain.losses.pair_losses.base import PAIR_LOSSES
from drivetrain.losses.registry import LossRegistry
from drivetrain.trainers.config.parse import RECIPES

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "rl.md", ROOT / "README.md"
PAIRS = ROOT / "docs" / "dpo.md"
PAPERS = ROOT / "docs" / "papers.md"
NAMED = ("grpo", "dapo", "gspo", "rloo", "ppo", "online_dpo")
"""The algorithms that the README names."""
KTO_PAPER = "Ethayarajh et al. 2024, arXiv:2402.01306"
PAIR_SETTINGS = {
    "exo_pair": " `dpo.label_smoothing=0.001`",
    "robust": " `dpo.label_smoothing=E`, where E is the share of labels that are wrong",
}
"""What losses of pairs need beside their names."""
TITLES = {
    "1301.2315": "The Optimal Reward Baseline for Gradient-Based Reinforcement Learning",
    "1506.02438": "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    "1707.06347": "Proximal Policy Optimization Algorithms",
    "2305.10425": "SLiC-HF: Sequence Likelihood Calibration with Human Feedback",
    "2305.18290": "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
    "2310.10505": "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    "2310.12036": "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    "2401.08417": "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
    "2402.00856": "Towards Efficient Exact Optimization of Language Model Alignment",
    "2402.01306": "KTO: Model Alignment as Prospect Theoretic Optimization",
    "2402.03300": "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    "2402.04792": "Direct Language Model Alignment from Online AI Feedback",
    "2402.05369": "Noise Contrastive Alignment of Language Models with Explicit Rewards",
    "2402.14740": "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    "2403.00409": "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    "2403.07691": "ORPO: Monolithic Preference Optimization without Reference Model",
    "2404.04656": "Binary Classifier Optimization for Large Language Model Alignment",
    "2405.00675": "Self-Play Preference Optimization for Language Model Alignment",
    "2405.14734": "SimPO: Simple Preference Optimization with a Reference-Free Reward",
    "2406.05882": "Distributional Preference Alignment of LLMs via Optimal Transport",
    "2406.08414": "Discovering Preference Optimization Algorithms with and for Large Language Models",
    "2408.06266": "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    "2501.03262": "REINFORCE++",
    "2503.14476": "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    "2503.19595": "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    "2503.20783": "Understanding R1-Zero-Like Training: A Critical Perspective",
    "2504.02546": "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    "2505.22617": "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    "2505.23585": "On-Policy RL with Optimal Reward Baseline",
    "2506.13585": "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    "2507.18071": "Group Sequence Policy Optimization",
    "2507.20673": "Geometric-Mean Policy Optimization",
    "2511.14846": "Empowering Multi-Turn Tool-Integrated Reasoning with Group Turn Policy Optimization",
    "2511.20347": "Soft Adaptive Policy Optimization",
    "2602.04879": "Rethinking the Trust Region in LLM Reinforcement Learning",
}
"""The titles of the papers that registrations cite, by their arXiv numbers."""


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
    """Return the table of losses of pairs, with that of single completions."""
    lines = ["| `dpo.loss` | loss of a pair | further settings | paper |", "|---|---|---|---|"]
    for name, spec in PAIR_LOSSES.all().items():
        settings = ", ".join(f"`{setting}`" for setting in sorted(spec.reads))
        lines.append(f"| `{name}` | {spec.summary} | {settings} | {linked(spec.paper)} |")
    paper = linked(KTO_PAPER)
    lines.append(
        f"| `kto` | of one completion with the log-ratio u: w (1 - s(beta (u - z0))) if it is desirable, w (1 - s(beta (z0 - u))) if not; the weight w of each kind is a setting | `desirable_weight`, `undesirable_weight` | {paper} |"
    )
    return "\n".join(lines)


def titled(paper: str) -> str:
    """Return a paper as two cells of a table: its title, and author, year and arXiv number."""
    number = re.search(r"arXiv:([\d.]+\d)", paper)
    return f"{TITLES.get(number[1], '') if number else ''} | {linked(paper)}"


def words(section: str, settings: Mapping[str, Any]) -> list[str]:
    """Return settings as a command line takes them.

    Args:
        section: The section that they belong to.
        settings: Their values.
    """
    # On a command line, null would mean the algorithm's own value; 0 switches such a setting off.
    values = {name: 0 if value is None else value for name, value in settings.items()}
    return [f"`{section}.{name}={json.dumps(value).strip(chr(34))}`" for name, value in values.items()]


def algorithm_settings(spec: AlgorithmSpec) -> list[str]:
    """Return the settings that an algorithm stands for, where they differ from the defaults."""
    loss = dict(spec.loss or {})
    # The run fills it in, with the largest number of tokens of a completion.
    loss.pop("length_norm", None)
    parts = words("rl.loss", loss) + words("rl.advantage", spec.advantage or {})
    return parts + (["`rl.dynamic_sampling=true`"] if spec.dynamic_sampling else [])


def papers_table() -> str:
    """Return the table of the papers of algorithms, and of those of objectives and estimators that no algorithm cites."""
    lines = ["| paper | cited as | settings | what they stand for |", "|---|---|---|---|"]
    rows = []
    cited = set()
    for name, spec in ALGORITHMS.all().items():
        recipe = recipe_of(name).strip("`")
        setting = f"`recipe={recipe}`" if recipe else f"`rl.algorithm={name}`"
        setting = f"`drivetrain {name} recipe={recipe}`" if name in COMMANDS and name != "grpo" else setting
        rows.append((spec.paper, setting, ", ".join(algorithm_settings(spec)) or "a preference loss, `dpo.*`"))
        cited.add(spec.paper)
    for registry, section in ((OBJECTIVES, "rl.loss"), (ESTIMATORS, "rl.advantage")):
        for name, kind in registry.all().items():
            if kind.paper not in cited:
                rows.append((kind.paper, f"`{section}.{registry.kind}={name}`", kind.summary))
    lines += [f"| {titled(paper)} | {setting} | {meaning} |" for paper, setting, meaning in sorted(rows)]
    return "\n".join(lines)


def pair_papers_table() -> str:
    """Return the table of the papers of losses of pairs, with that of single completions."""
    rows = []
    for name, spec in PAIR_LOSSES.all().items():
        more = PAIR_SETTINGS.get(name, "")
        traits = [f"`dpo.sft_weight={spec.sft_weight}`"] if spec.sft_weight else []
        traits += ["`dpo.length_normalize=true`"] if spec.per_token else []
        traits += [] if spec.needs_reference else ["no reference"]
        rows.append((spec.paper, f"`dpo.loss={name}`{more}", ", ".join(traits)))
    rows.append((KTO_PAPER, "`dpo.loss=kto`", "single completions"))
    lines = ["| paper | cited as | settings | defaults that come with it |", "|---|---|---|---|"]
    lines += [f"| {titled(paper)} | {setting} | {traits} |" for paper, setting, traits in sorted(rows)]
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
        PAPERS: filled(
            PAPERS.read_text(),
            {"papers": f"\n\n{papers_table()}\n\n", "papers of pairs": f"\n\n{pair_papers_table()}\n\n"},
        ),
        README: filled(README.read_text(), {"other algorithms": str(len(ALGORITHMS.all().keys() - set(NAMED)))}),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
