"""Metrics of a step's completions, and their presentation."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..loop.console import Lines, TextPart
from ..loop.formats import duration
from ..loop.loggers import Panel
from ..loop.samples import HeldOutCompletion
from .completions import Completion, episodes_of, equal_groups, scored_only

PANELS = (
    Panel(ylabel="reward", curves={"train": ("train", "reward"), "eval": ("eval", "reward")}),
    Panel(ylabel="tokens per completion", curves={"train": ("train", "length"), "eval": ("eval", "length")}),
)
"""The panels of the plot at the end of a run."""


def completion_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the metrics of scored completions; the documents of an episode count as one.

    Returns:
        The mean and the standard deviation of the `reward`; the mean of each reward, `reward/NAME`, over the completions that have it; mean
        and maximum `length` in tokens, without observations; the fraction of completions that are `truncated`; the number of completions,
        `completions`, and of `groups`; the fraction of groups in which all rewards are equal, `equal_groups`; and with an environment, those of
        `episode_metrics`.
    """
    documents, places = completions, episodes_of(completions)
    completions = scored_only(documents)
    count = max(1, len(completions))
    rewards = [completion.reward for completion in completions]
    mean = sum(rewards) / count
    numbers = {
        "reward": mean if completions else math.nan,
        # A single completion has a deviation of 0, not of 0 / 0.
        "reward_std": math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, count - 1)),
    }
    for name in dict.fromkeys(name for completion in completions for name in completion.rewards):
        values = [completion.rewards[name] for completion in completions if name in completion.rewards]
        numbers[f"reward/{name}"] = sum(values) / len(values)
    # The tokens of all documents of an episode count for its last one, at whose position its entry is.
    written = dict.fromkeys(places, 0)
    for place, document in zip(places, documents, strict=True):
        written[place] += len(document.written)
    lengths = list(written.values())
    groups = len({completion.group for completion in completions})
    return {
        **numbers,
        "length": sum(lengths) / count,
        "length_max": float(max(lengths, default=0)),
        "truncated": sum(not completion.finished for completion in completions) / count,
        "completions": float(len(completions)),
        "groups": float(groups),
        "equal_groups": len(equal_groups(completions)) / max(1, groups),
        **episode_metrics(documents),
    }


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the metrics of episodes; none without an environment.

    Returns:
        The mean number of `turns`, of `documents`, and of tokens in observations, `observation_tokens`; the fractions of episodes that
        ended at a limit, `max_turns` and `max_tokens`; and the mean of each number of the environment, `environment/NAME`, over the
        episodes that have it.
    """
    documents = [completion.episode for completion in completions if completion.episode is not None]
    episodes = [completion.episode for completion in scored_only(completions) if completion.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    observed = sum(len(completion.tokens) - len(completion.written) for completion in completions)
    numbers = {
        "turns": sum(len(document.spans) for document in documents) / count,
        "documents": len(documents) / count,
        "observation_tokens": observed / count,
        **{end: sum(episode.end == end for episode in episodes) / count for end in ("max_turns", "max_tokens")},
    }
    for name in dict.fromkeys(name for episode in episodes for name in episode.metrics):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        numbers[f"environment/{name}"] = sum(values) / len(values)
    return numbers


def staleness(completions: Sequence[Completion], version: int) -> float:
    """Return the number of versions between the oldest token and the trained weights."""
    made_by = [made for completion in completions for made in completion.versions]
    return float(version - min(made_by)) if made_by else 0.0


def mixed_versions(completions: Sequence[Completion]) -> float:
    """Return the fraction of completions with tokens from more than one version of the weights."""
    return sum(len(completion.versions) > 1 for completion in completions) / max(1, len(completions))


def held_out_completions(completions: Sequence[Completion]) -> list[HeldOutCompletion]:
    """Return completions with their rewards, for people to read."""
    return [
        HeldOutCompletion(
            name=completion.prompt.name,
            prompt=_text(completion.prompt.content),
            completion=completion.text,
            rewards={"reward": completion.reward, **completion.rewards},
        )
        for completion in completions
    ]


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {_of_parts(message['content'])}" for message in content)


def _of_parts(content: Any) -> str:
    """Return the content of a message as text, with `<image>` for an image."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


FAILED = ("error/", "timeout/", "invalid/", "lost/")
"""The prefixes of failure counts, of rewards and of environments."""
LINE = ("reward_accuracy", "reward_margin", "pairs", "kl", "entropy", "critic/loss", "critic/value_error")
"""The metrics in the line of a step, if present, in addition to rewards and lengths."""


class RLLines(Lines):
    """The formatter of console lines."""

    def progress(self, record: Mapping[str, Any], total: int, left: float) -> list[TextPart]:
        """Return the parts of a step's line."""
        rewards = [f"{n.removeprefix('reward/')} {v:.3f}" for n, v in record.items() if n.startswith("reward/")]
        return [
            TextPart(f"step {record['step']}/{total}"),
            TextPart(f"reward {record['reward']:.3f}"),
            *([TextPart(f"({', '.join(rewards)})", 4)] if len(rewards) > 1 else []),
            TextPart(f"length {record['length']:.1f}", 1),
            *(TextPart(f"{name} {record[name]:.4f}", 3) for name in LINE if name in record),
            *([TextPart(f"grad_norm {record['grad_norm']:.3f}", 3)] if "grad_norm" in record else []),
            *([TextPart(f"truncated {100 * record['truncated']:.0f}%", 2)] if record["truncated"] else []),
            *(TextPart(text) for text in _failures(record)),
            TextPart(f"{record['seconds']:.1f} s", 2),
            TextPart(f"({_shares(record)})", 5),
            TextPart(f"{duration(left)} left", 1),
        ]

    def evaluation(self, record: Mapping[str, Any]) -> str:
        """Return the line of an evaluation."""
        names = ("reward", "accuracy", *(name for name in record if name.startswith(("avg@", "pass@"))))
        measured = "  ".join(f"{name} {record[name]:.4f}" for name in names if name in record)
        return f"step {record['step']}  {measured}  length {record['length']:.1f}  {record['seconds']:.1f} s"


def _failures(record: Mapping[str, Any]) -> list[str]:
    """Return the counts of completions that rewards could not score, and of those that were left out for it."""
    failed = sum(value for name, value in record.items() if name.startswith(FAILED))
    return [f"{name} {count:.0f}" for name, count in (("failed", failed), ("dropped", record.get("dropped", 0.0))) if count]


def _shares(record: Mapping[str, Any]) -> str:
    phases = {"rollout": ("rollout",), "update": ("update", "update_critic"), "rewards": ("reward_wait",)}
    total = max(record["seconds"], 1e-9)
    shares = {name: sum(record.get(f"seconds/{phase}", 0.0) for phase in names) / total for name, names in phases.items()}
    return ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares.items() if share >= 0.005)


class RLSummary:
    """Statistics of a run for the summary at its end; a logger.

    Args:
        total_steps: The number of steps in the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total, self._start = total_steps, time.monotonic()
        self._records: list[Mapping[str, Any]] = []
        self._evaluated: list[Mapping[str, Any]] = []

    def log(self, record: Mapping[str, Any]) -> None:
        """Collect what the summary needs from a record."""
        kept = ("step", "reward", "seconds", "completions", "skipped", "peak_gib", "accuracy")
        target = self._evaluated if record.get("split") == "eval" else self._records
        target.append({name: record[name] for name in kept if name in record})

    def log_completions(self, step: int, completions: Sequence[HeldOutCompletion]) -> None:
        """Ignore completions, which are not part of the summary."""

    def close(self) -> None:
        """Do nothing, since there is nothing to flush."""

    def lines(self, outputs: Mapping[str, str]) -> list[str]:
        """Format the summary, one string per line.

        Args:
            outputs: The location of each output of the run, by name.
        """
        rows: dict[str, str] = {}
        if self._records:
            first, last = self._records[0], self._records[-1]
            # The first step allocates and compiles.
            seconds = statistics.median([record["seconds"] for record in self._records[1:] or self._records])
            completions = sum(record["completions"] for record in self._records)
            rows = {
                "steps": f"{first['step']} to {last['step']} of {self._total}",
                "time": f"{duration(time.monotonic() - self._start)}, {seconds:.2f} s per step (median)",
                "reward": f"{first['reward']:.4g} at the first step, {last['reward']:.4g} at the last",
                "completions": f"{completions:.0f}",
                "peak memory": f"{max(record.get('peak_gib', 0.0) for record in self._records):.2f} GiB in a worker",
            }
        if self._evaluated:
            names = [name for name in ("reward", "accuracy") if name in self._evaluated[0]]
            rows["evaluation"] = "; ".join(
                f"{name} {self._evaluated[0][name]:.4g} at first, {self._evaluated[-1][name]:.4g} at last" for name in names
            )
        return [f"{name:12} {value}" for name, value in {**rows, **outputs}.items()]
