"""The formulas of reinforcement learning, written anew from the papers, for one document at a time. Nothing of the product is imported.

Axes: R tokens of an answer; every tensor is float64.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Formula:
    """An algorithm, as docs/rl.md describes it.

    Args:
        advantage: One of `ADVANTAGES`.
        objective: One of `OBJECTIVES`.
        low: Distance below 1 (below a log-ratio of 0, or of a divergence) from which a token is clipped.
        high: Distance above 1.
        dual: The largest ratio of a token with a negative advantage.
        ratio: What the ratio is of: a token, a sequence, or the sequence with the gradient of a token (sequence-token).
        mean: What is averaged: all tokens (token), means of answers (answer), sums of answers (sum), sums over the longest length (norm).
        kl: The weight of the KL divergence in the loss, and its estimate.
        reward_kl: The weight of the KL divergence (k1) in the rewards.
        entropy: The weight of the entropy.
        gamma: The discount per token.
        importance: truncate or mask: the weights p / q between actor and generator.
        by_answer: Whether these weights are of answers.
        rejection: The lowest and highest ratio q / p of a token, and the largest mean of k3 in an answer.
        old: Whose log-probabilities ratios compare with: actor, rollout, or update for a single update on policy.
        norm_rewards: Whether rewards get mean 0 and variance 1.
        clip_rewards: The largest absolute value of a reward.
        covariances: The bounds between which tokens are left out (Clip-Cov), or the share of the highest ones (KL-Cov).
    """

    advantage: str = "grpo"
    objective: str = "clipped"
    low: float = 0.2
    high: float = 0.2
    dual: float = math.inf
    ratio: str = "token"
    mean: str = "token"
    kl: tuple[float, str] = (0.0, "k3")
    reward_kl: float = 0.0
    entropy: float = 0.0
    gamma: float = 1.0
    importance: str | None = None
    by_answer: bool = False
    rejection: tuple[float, float, float] | None = None
    old: str = "actor"
    norm_rewards: bool = False
    clip_rewards: float = math.inf
    covariances: tuple[float, float] | float | None = None


# ---- advantages ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Completions:
    """What advantages are made of, one entry per answer; `[R]` where they are tensors."""

    rewards: list[float]
    groups: list[int]
    baselines: list[float | None]
    old: list[Tensor]
    reference: list[Tensor]
    values: list[Tensor]
    squares: list[Tensor]
    weights: list[Tensor] | None = None

    def peers(self, i: int) -> list[int]:
        """The answers to the same prompt, this one included."""
        return [j for j, group in enumerate(self.groups) if group == self.groups[i]]


Advantages = tuple[list[Tensor], list[Tensor] | None]


def shaped(rewards: Sequence[float], formula: Formula) -> list[float]:
    """Rewards with mean 0 and variance 1 over the step, and bounded, if the formula says so."""
    mean, scale = 0.0, 1.0
    if formula.norm_rewards:
        mean = sum(rewards) / len(rewards)
        scale = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [min(max((r - mean) / scale, -formula.clip_rewards), formula.clip_rewards) for r in rewards]


def advantages_of(x: Completions, formula: Formula) -> Advantages:
    """The advantage of each token, and the returns that a critic learns."""
    return ADVANTAGES[formula.advantage](x, formula)


def _token_rewards(x: Completions, i: int, formula: Formula) -> list[float]:
    """InstructGPT's: at every token a penalty for leaving the reference, at the last one the reward."""
    rewards: list[float] = (-formula.reward_kl * (x.old[i] - x.reference[i])).tolist()
    rewards[-1] += x.rewards[i]
    return rewards


def _returns(rewards: Sequence[float], gamma: float) -> Tensor:
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return torch.tensor(returns[::-1], dtype=torch.float64)


def _scores(x: Completions, formula: Formula) -> list[float]:
    """The reward of an answer, less the penalty of all of its tokens."""
    return [sum(_token_rewards(x, i, formula)) for i in range(len(x.rewards))]


def _by_answer(x: Completions, scores: Sequence[float]) -> list[Tensor]:
    return [torch.full_like(old, score) for old, score in zip(x.old, scores, strict=True)]


def _deviation(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((n - mean) ** 2 for n in numbers) / max(1, len(numbers) - 1))


def _whitened(advantages: list[Tensor]) -> list[Tensor]:
    every = torch.cat(advantages)
    return [(a - every.mean()) / (every.var() + 1e-8).sqrt() for a in advantages]


def _distances(x: Completions, formula: Formula) -> list[float]:
    scores = _scores(x, formula)
    return [score - sum(scores[j] for j in x.peers(i)) / len(x.peers(i)) for i, score in enumerate(scores)]


def _grpo(x: Completions, formula: Formula) -> Advantages:
    """DeepSeekMath, arXiv:2402.03300, section 4.1.2."""
    scores = _scores(x, formula)
    spreads = [_deviation([scores[j] for j in x.peers(i)]) for i in range(len(scores))]
    return _by_answer(x, [d / (s + 1e-6) for d, s in zip(_distances(x, formula), spreads, strict=True)]), None


def _centered(x: Completions, formula: Formula) -> Advantages:
    """Dr. GRPO, arXiv:2503.20783: without the deviation."""
    return _by_answer(x, _distances(x, formula)), None


def _pass_at_k(x: Completions, formula: Formula) -> Advantages:
    """arXiv:2503.19595: only the best answer of a group counts, by how much it is better than the second best."""
    scores = _scores(x, formula)
    found = [0.0] * len(scores)
    for i in range(len(scores)):
        others = [scores[j] for j in x.peers(i) if j != i]
        if others and scores[i] > max(others):
            found[i] = (scores[i] - max(others)) / (_deviation([*others, scores[i]]) + 1e-6)
    return _by_answer(x, found), None


def _rloo(x: Completions, formula: Formula) -> Advantages:
    """arXiv:2402.14740, section 3.2: the mean of the other answers is the baseline."""
    scores, found = _scores(x, formula), []
    for i in range(len(scores)):
        others = [scores[j] for j in x.peers(i) if j != i]
        found.append(scores[i] - sum(others) / len(others) if others else 0.0)
    return _by_answer(x, found), None


def _opo(x: Completions, formula: Formula) -> Advantages:
    """arXiv:2505.23585: the baseline is weighted by length; an answer without others has none."""
    scores, found = _scores(x, formula), []
    for i in range(len(scores)):
        peers = x.peers(i)
        baseline = sum(len(x.old[j]) * scores[j] for j in peers) / sum(len(x.old[j]) for j in peers)
        found.append(scores[i] - (baseline if len(peers) > 1 else 0.0))
    return _by_answer(x, found), None


def _gpg(x: Completions, formula: Formula) -> Advantages:
    """arXiv:2504.02546: scaled up by the share of answers from which something can be learned."""
    scores = _scores(x, formula)
    useful = [i for i in range(len(scores)) if len({scores[j] for j in x.peers(i)}) > 1]
    return _by_answer(x, [d * len(scores) / len(useful) for d in _distances(x, formula)]), None


def _optimal_token_baseline(x: Completions, formula: Formula) -> Advantages:
    """Of each position the baseline of least variance, arXiv:1301.2315: weights are squared norms of the gradients so far."""
    returns = [_returns(_token_rewards(x, i, formula), 1.0) for i in range(len(x.rewards))]
    energy = []
    for i, old in enumerate(x.old):
        norms = 1 - 2 * old.exp() + x.squares[i]
        energy.append((norms if x.weights is None else norms * x.weights[i] ** 2).cumsum(0))
    found = [r.clone() for r in returns]
    for i in range(len(returns)):
        for t in range(len(returns[i])):
            there = [j for j in x.peers(i) if len(returns[j]) > t]
            if len(there) > 1:
                total = sum(float(energy[j][t]) for j in there)
                found[i][t] -= sum(float(energy[j][t] * returns[j][t]) for j in there) / (total + 1e-8)
    return found, returns


def _reinforce(x: Completions, formula: Formula) -> Advantages:
    """REINFORCE++, arXiv:2501.03262: whitened returns."""
    returns = [_returns(_token_rewards(x, i, formula), formula.gamma) for i in range(len(x.rewards))]
    return _whitened(returns), returns


def _reinforce_baseline(x: Completions, formula: Formula) -> Advantages:
    """REINFORCE++ with the mean of the group as baseline."""
    return _whitened(_by_answer(x, _distances(x, formula))), None


def _remax(x: Completions, formula: Formula) -> Advantages:
    """arXiv:2310.10505: the reward of the most likely answer is the baseline."""
    returns = [_returns(_token_rewards(x, i, formula), formula.gamma) for i in range(len(x.rewards))]
    baselines = [math.nan if baseline is None else baseline for baseline in x.baselines]
    return [r - baseline for r, baseline in zip(returns, baselines, strict=True)], returns


def _gae(x: Completions, formula: Formula) -> Advantages:
    """arXiv:1506.02438, equation 16, with lambda 0.95."""
    advantages, returns = [], []
    for i, values in enumerate(x.values):
        rewards, v, carried, found = _token_rewards(x, i, formula), [*values.tolist(), 0.0], 0.0, []
        for t in reversed(range(len(rewards))):
            carried = rewards[t] + formula.gamma * v[t + 1] - v[t] + formula.gamma * 0.95 * carried
            found.append(carried)
        advantages.append(torch.tensor(found[::-1], dtype=torch.float64))
        returns.append(advantages[-1] + values)
    return _whitened(advantages), returns


ADVANTAGES: Mapping[str, Callable[[Completions, Formula], Advantages]] = {
    "grpo": _grpo,
    "centered": _centered,
    "pass_at_k": _pass_at_k,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "optimal_token_baseline": _optimal_token_baseline,
    "reinforce": _reinforce,
    "reinforce_baseline": _reinforce_baseline,
    "remax": _remax,
    "gae": _gae,
}


# ---- what tokens count ---------------------------------------------------------------------------------------------------


def importance_of(old: Sequence[Tensor], sampled: Sequence[Tensor], formula: Formula) -> list[Tensor] | None:
    """The weights p / q between actor and generator, at most 2, or 0 unless they are from 0.5 to 2; None without a correction."""
    if formula.importance is None:
        return None
    weights = []
    for p, q in zip(old, sampled, strict=True):
        ratio = ((p - q).sum().expand(len(p)) if formula.by_answer else p - q).exp()
        inside = (ratio >= 0.5) & (ratio <= 2)
        weights.append(ratio.clamp(max=2) if formula.importance == "truncate" else ratio * inside)
    return weights


def accepted_of(old: Sequence[Tensor], sampled: Sequence[Tensor], formula: Formula) -> list[Tensor]:
    """Which tokens are learned."""
    masks = []
    for p, q in zip(old, sampled, strict=True):
        mask = torch.ones(len(p), dtype=torch.bool)
        if formula.rejection is not None:
            low, high, limit = formula.rejection
            back = (q - p).exp()
            # Of KL(q || p), by samples of q: p / q - 1 - log(p / q).
            divergence = ((p - q).exp() - 1 - (p - q)).mean()
            mask = (back >= low) & (back <= high) & (divergence <= limit)
        masks.append(mask)
    return masks


def marks_of(old: Sequence[Tensor], advantages: Sequence[Tensor], formula: Formula) -> list[Tensor]:
    """The tokens whose covariance of advantage and log-probability is between bounds, or among the highest, arXiv:2505.22617."""
    lengths = [len(p) for p in old]
    if formula.covariances is None:
        return [torch.zeros(n, dtype=torch.bool) for n in lengths]
    log_p, advantage = torch.cat(list(old)), torch.cat(list(advantages))
    covariance = (advantage - advantage.mean()) * (log_p - log_p.mean())
    if isinstance(formula.covariances, tuple):
        low, high = formula.covariances
        marks = (covariance > low) & (covariance < high)
    else:
        count = max(1, int(formula.covariances * len(covariance)))
        marks = covariance >= covariance.sort(descending=True).values[count - 1]
    return list(marks.split(lengths))


# ---- losses --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of an answer, `[R]` each: log-probabilities now and before, the ratio and its logarithm, advantages, marks."""

    now: Tensor
    old: Tensor
    ratio: Tensor
    log_ratio: Tensor
    advantage: Tensor
    marked: Tensor
    mask: Tensor


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Losses of tokens, and which of them are clipped."""

    losses: Tensor
    clipped: Tensor
    dual: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.bool))


def tokens_of(now: Tensor, old: Tensor, advantage: Tensor, marked: Tensor, mask: Tensor, formula: Formula) -> Tokens:
    """The ratio of each token: its own, or (GSPO, arXiv:2507.18071, equations 7 and 14) of its answer."""
    log_ratio = now - old
    mean = (log_ratio * mask).sum() / mask.sum()
    if formula.ratio == "sequence":
        ratio = mean.exp().expand(len(now))
    elif formula.ratio == "sequence-token":
        ratio = mean.exp().detach() * (now - now.detach()).exp()
    else:
        ratio = log_ratio.exp()
    return Tokens(now=now, old=old, ratio=ratio, log_ratio=log_ratio, advantage=advantage, marked=marked, mask=mask)


def _clipped(x: Tokens, f: Formula) -> Losses:
    """PPO, arXiv:1707.06347, equation 7, with two bounds (DAPO, arXiv:2503.14476) and a third one (arXiv:1912.09729)."""
    plain, bounded = x.ratio * x.advantage, x.ratio.clamp(1 - f.low, 1 + f.high) * x.advantage
    gain = torch.minimum(plain, bounded)
    if math.isinf(f.dual):
        return Losses(losses=-gain, clipped=bounded < plain)
    least = f.dual * x.advantage
    dual = (x.advantage < 0) & (gain < least)
    return Losses(losses=-torch.where(dual, least, gain), clipped=bounded < plain, dual=dual)


def _cispo(x: Tokens, f: Formula) -> Losses:
    """MiniMax-M1, arXiv:2506.13585, equation 4; without a lower bound."""
    weight = x.ratio.detach().clamp(max=1 + f.high)
    return Losses(losses=-weight * x.advantage * x.now, clipped=x.ratio > 1 + f.high)


def _gpg_loss(x: Tokens, f: Formula) -> Losses:
    """arXiv:2504.02546: no ratio."""
    return Losses(losses=-x.advantage * x.now, clipped=torch.zeros_like(x.mask))


def _sapo(x: Tokens, f: Formula) -> Losses:
    """arXiv:2511.20347: tau is 1 where the advantage is positive, else 1.05."""
    tau = torch.where(x.advantage > 0, 1.0, 1.05)
    return Losses(losses=-x.advantage * 4 / tau / (1 + (-tau * (x.ratio - 1)).exp()), clipped=torch.zeros_like(x.mask))


def _gmpo(x: Tokens, f: Formula) -> Losses:
    """arXiv:2507.20673: the geometric mean of an answer's clipped ratios."""
    bounded = x.log_ratio.clamp(-f.low, f.high)
    worse = torch.where(x.advantage > 0, torch.minimum(x.log_ratio, bounded), torch.maximum(x.log_ratio, bounded))
    mean = ((worse * x.mask).sum() / x.mask.sum()).exp()
    return Losses(losses=-x.advantage * mean, clipped=(worse != x.log_ratio) & (x.advantage != 0))


def _within(x: Tokens, inside: Tensor) -> Losses:
    """Ratios as weights of at most 20, of the tokens inside the region."""
    weight = x.ratio.detach().clamp(max=20.0) * inside
    return Losses(losses=-weight * x.advantage * x.now, clipped=~inside)


def _dppo_tv(x: Tokens, f: Formula) -> Losses:
    """arXiv:2602.04879: by how much the probability of the token has moved in the direction of the advantage."""
    moved = (x.now.exp() - x.old.exp()).detach()
    return _within(x, torch.where(x.advantage > 0, moved, -moved) <= f.low)


def _dppo_kl(x: Tokens, f: Formula) -> Losses:
    """The same by the divergence of the token against all others."""
    p, q = x.now.detach().exp(), x.old.exp()
    divergence = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    away = torch.where(x.advantage > 0, p > q, p < q)
    return _within(x, ~away | (divergence <= f.low))


def _clip_cov(x: Tokens, f: Formula) -> Losses:
    """arXiv:2505.22617: marked tokens are left out."""
    return Losses(losses=torch.where(x.marked, 0.0, _clipped(x, f).losses), clipped=x.marked)


def _kl_cov(x: Tokens, f: Formula) -> Losses:
    """The same paper: marked tokens pay for their change."""
    return Losses(losses=-x.ratio * x.advantage + x.marked * x.log_ratio.abs(), clipped=x.marked)


OBJECTIVES: Mapping[str, Callable[[Tokens, Formula], Losses]] = {
    "clipped": _clipped,
    "cispo": _cispo,
    "gpg": _gpg_loss,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}

ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: ((-x).exp() - 1 + x).clamp(max=10),
    "abs": torch.abs,
}
"""Of log(p / q), of the KL divergence of p from q: Schulman 2020; k3 is at most 10 at a token, as in verl."""
