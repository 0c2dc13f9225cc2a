"""Advantages and returns from rewards, as pure functions of padded completions.

Axes: B completions, R tokens of the longest completion. `mask` `[B, R]` is 1 at the tokens of a completion. Results are 0 everywhere
else, regardless of the inputs there. Lists of numbers are converted to tensors, and integers and 16-bit floats are computed in
float32. If a used value is not finite, an error names its completion.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..engine.errors import BatchError
from ..engine.packing.batch import is_integer

Reduce: TypeAlias = Callable[[Tensor], Tensor]
Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[Sequence[float]]
"""A tensor, or nested lists that can be converted to one."""


def token_rewards(rewards: Numbers, mask: Numbers, kl: Numbers | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return `[B, R]`: each completion's reward at its last token, minus a KL penalty at every token.

    Args:
        rewards: `[B]`, the reward of each completion.
        mask: `[B, R]`, the mask of the completion tokens.
        kl: `[B, R]`, an estimate of the KL divergence from the reference; None adds no penalty.
        kl_coef: The weight of the KL penalty.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2.
    """
    response_mask = _mask(mask)
    scores = _numbers("rewards", rewards, response_mask.shape[:1], response_mask.any(1))
    # The last token of the mask, which is not the last column where a completion is shorter or ends with the output of
    # a tool.
    last = response_mask & (response_mask.long().cumsum(1) == response_mask.long().sum(1, keepdim=True))
    result = torch.where(last, scores[:, None], 0.0)
    return result if kl is None else result - kl_coef * _numbers("kl", kl, response_mask.shape, response_mask)


def gae(rewards: Numbers, values: Numbers, mask: Numbers, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates, and the returns that the critic is trained on.

    A masked token inside a completion (such as the output of a tool) is skipped: the tokens before and after it are treated as
    adjacent.

    Args:
        rewards: `[B, R]`, the reward of each token.
        values: `[B, R]`, the value of the state before the token.
        mask: `[B, R]`, the mask of the completion tokens.
        gamma: The discount per token.
        lam: lambda, the weight of longer estimates.

    Returns:
        The advantages `[B, R]` and the returns `[B, R]`.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16.
    """
    response_mask = _mask(mask)
    reward, value = (_numbers(n, v, response_mask.shape, response_mask) for n, v in (("rewards", rewards), ("values", values)))
    value = value.to(torch.promote_types(reward.dtype, value.dtype))
    advantages = torch.zeros_like(value)
    # A completion is taken to be the end of its episode, so nothing is expected after its last token.
    next_value = value.new_zeros(len(value))
    accumulated = torch.zeros_like(next_value)
    for t in reversed(range(response_mask.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        # Both are carried over masked tokens unchanged, so that the tokens around a gap are adjacent.
        accumulated = torch.where(response_mask[:, t], delta + gamma * lam * accumulated, accumulated)
        next_value = torch.where(response_mask[:, t], value[:, t], next_value)
        advantages[:, t] = torch.where(response_mask[:, t], accumulated, 0.0)
    return advantages, advantages + value


def whiten(values: Numbers, mask: Numbers, eps: float = 1e-8, *, reduce: Reduce | None = None) -> Tensor:
    """Shift and scale the values to mean 0 and variance 1 over the tokens of all completions.

    Args:
        values: `[B, R]`, the values of the tokens.
        mask: `[B, R]`, the mask of the completion tokens.
        eps: A small constant that prevents a division by zero.
        reduce: Adds up a tensor over the ranks that hold the other completions; None if there are none.
    """
    response_mask = _mask(mask)
    numbers = _numbers("values", values, response_mask.shape, response_mask)
    floats, reduce = numbers.double(), reduce or _alone
    # In float64, so that the result does not depend on how the completions are distributed.
    count, total = reduce(torch.stack([response_mask.sum().double(), floats.sum()]))
    # First the mean and then the squares of the distances: the mean of squares minus the square of the mean would lose
    # the digits that matter if the variance is small.
    centered = torch.where(response_mask, floats - total / count.clamp(min=1), 0.0)
    variance = reduce((centered**2).sum()) / (count - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + eps)).to(numbers.dtype)


def grpo(rewards: Numbers, groups: Numbers, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return `[B]`: each completion's reward relative to the other completions to the same prompt.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        scale: Whether to divide by the group's standard deviation; False is Dr. GRPO (arXiv:2503.20783).
        eps: A small constant that prevents a division by zero.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The standard deviation is the sample's (n - 1), as in common
    implementations of the paper. A completion without others in its group has an advantage of 0.
    """
    scores, group, counts = _grouped(rewards, groups)
    # In float32 the mean of equal rewards can differ from them by rounding, and scaling would blow that difference up to a
    # full-size advantage.
    scores64, n = scores.double(), counts.double()
    mean = torch.zeros_like(n).index_add(0, group, scores64) / n
    advantages = scores64 - mean[group]
    if scale:
        # In a group of one, the variance and the distance are both 0, and so is the advantage.
        variance = torch.zeros_like(n).index_add(0, group, advantages**2) / (n - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt()[group] + eps)
    return advantages.to(scores.dtype)


def turn_grpo(
    rewards: Numbers,
    turns: Numbers,
    groups: Numbers,
    mask: Numbers,
    gamma: float = 1.0,
    *,
    scale: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Return `[B, R]`: the return of each turn relative to the same turn in the other completions to the same prompt.

    The return of a turn is the sum of its rewards and of those of later turns, each discounted by gamma for every turn in between. If each
    completion has one turn, the result equals `grpo`.

    Args:
        rewards: `[B, R]`, the reward of each token.
        turns: `[B, R]` int64, the number of the turn that each token belongs to, starting at 0.
        groups: `[B]` int64, the same number for all completions to one prompt.
        mask: `[B, R]`, the mask of the completion tokens.
        gamma: The discount per turn.
        scale: Whether to divide by the standard deviation.
        eps: A small constant that prevents a division by zero.

    Source: Ding et al. 2025, arXiv:2511.14846, for returns of turns instead of rewards of completions. Turns are compared at equal numbers,
    because a later turn has fewer rewards before it. A turn without a counterpart in any other completion has an advantage of 0.
    """
    response_mask = _mask(mask)
    token_scores = _numbers("rewards", rewards, response_mask.shape, response_mask)
    scores = token_scores.double()
    numbers = _tensor("turns", turns)
    if numbers.shape != response_mask.shape or (numbers.numel() and not is_integer(numbers)):
        raise BatchError(
            f"turns is {str(numbers.dtype).removeprefix('torch.')} {list(numbers.shape)}; it must hold integers {list(response_mask.shape)}"
        )
    ids = _tensor("groups", groups)
    advantages = torch.zeros_like(scores)
    last = int(numbers[response_mask].max()) if bool(response_mask.any()) else -1
    later = scores.new_zeros(len(scores))
    # From the last turn to the first, so that `later` already holds the return of the following turn.
    for turn in range(last, -1, -1):
        here = response_mask & (numbers == turn)
        has_turn = here.any(1)
        returns = torch.where(here, scores, 0.0).sum(1) + gamma * later
        # Completions that have ended before this turn have no return for it.
        later = torch.where(has_turn, returns, later)
        relative = returns.new_zeros(len(returns))
        if bool(has_turn.any()):
            relative[has_turn] = grpo(returns[has_turn], ids[has_turn], scale=scale, eps=eps)
        advantages = torch.where(here, relative[:, None], advantages)
    return advantages.to(token_scores.dtype)


def rloo(rewards: Numbers, groups: Numbers) -> Tensor:
    """Return `[B]`: each completion's reward minus the mean reward of the other completions to the same prompt.

    A completion without others in its group has an advantage of 0.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2.
    """
    scores, group, counts = _grouped(rewards, groups)
    scores64, n = scores.double(), counts.double()[group]
    total = torch.zeros(len(counts), dtype=scores64.dtype, device=scores64.device).index_add(0, group, scores64)[group]
    advantages = torch.where(n > 1, scores64 - (total - scores64) / (n - 1).clamp(min=1), torch.zeros_like(scores64))
    return advantages.to(scores.dtype)


def discounted_returns(rewards: Numbers, mask: Numbers, gamma: float = 1.0) -> Tensor:
    """Return `[B, R]`: at each token, the discounted sum of the rewards from that token on.

    Args:
        rewards: `[B, R]`, the reward of each token.
        mask: `[B, R]`, the mask of the completion tokens.
        gamma: The discount per token.
    """
    response_mask = _mask(mask)
    return gae(rewards, torch.zeros(response_mask.shape, device=response_mask.device), response_mask, gamma, 1.0)[1]


def reinforce_plus_plus(rewards: Numbers, mask: Numbers, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute whitened returns as advantages, without a critic.

    Args:
        rewards: `[B, R]`, the reward of each token, including penalties.
        mask: `[B, R]`, the mask of the completion tokens.
        gamma: The discount per token.

    Returns:
        The advantages `[B, R]` and the returns `[B, R]`.

    Source: Hu 2025, arXiv:2501.03262, section 3.
    """
    returns = discounted_returns(rewards, mask, gamma)
    return whiten(returns, mask), returns


def reinforce_plus_plus_baseline(rewards: Numbers, groups: Numbers, mask: Numbers) -> Tensor:
    """Return `[B, R]`: each completion's reward minus the mean of its group, whitened over the tokens of all completions.

    A completion without others in its group has an advantage of 0 before it is whitened.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        mask: `[B, R]`, the mask of the completion tokens.

    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    return whiten(broadcast_to_tokens(grpo(rewards, groups, scale=False), mask), mask)


def remax(rewards: Numbers, baselines: Numbers, mask: Numbers, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the returns minus the reward of the greedy completion to the same prompt.

    Args:
        rewards: `[B, R]`, the reward of each token, including penalties.
        baselines: `[B]`, the reward of the greedy completion to the prompt of each completion.
        mask: `[B, R]`, the mask of the completion tokens.
        gamma: The discount per token.

    Returns:
        The advantages `[B, R]` and the returns `[B, R]`.

    Source: Li et al. 2024, arXiv:2310.10505, algorithm 1.
    """
    returns = discounted_returns(rewards, mask, gamma)
    return returns - broadcast_to_tokens(baselines, mask).to(returns.dtype), returns


def opo(rewards: Numbers, groups: Numbers, mask: Numbers) -> Tensor:
    """Return `[B]`: each completion's reward minus the length-weighted mean of its group.

    A completion without others in its group has its reward as advantage, as in verl.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        mask: `[B, R]`, the mask of the completion tokens.

    Source: Hao et al. 2025, OPO, arXiv:2505.23585.
    """
    scores, group, counts = _grouped(rewards, groups)
    lengths = _mask(mask).double().sum(1)
    totals = torch.zeros(2, len(counts), dtype=torch.float64, device=scores.device)
    totals = totals.index_add(1, group, torch.stack([lengths * scores.double(), lengths]))
    # Without others in the group, the mean would be the reward itself, and the advantage always 0.
    baselines = torch.where(counts > 1, totals[0] / totals[1].clamp(min=1), torch.zeros_like(totals[0]))
    return (scores.double() - baselines[group]).to(scores.dtype)


def gpg(rewards: Numbers, groups: Numbers, *, reduce: Reduce | None = None) -> Tensor:
    """Return `[B]`: each completion's reward minus the mean of its group, times `gpg_scale`.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        reduce: See `gpg_scale`.

    Source: Chu et al. 2025, GPG, arXiv:2504.02546.
    """
    return grpo(rewards, groups, scale=False) * float(gpg_scale(rewards, groups, reduce=reduce))


def gpg_scale(rewards: Numbers, groups: Numbers, *, reduce: Reduce | None = None) -> Tensor:
    """Return the number of completions divided by the number of those in groups whose rewards are not all equal.

    It compensates for groups without a learning signal, which would shrink a mean over all tokens.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        reduce: Adds up a tensor over the ranks that hold the other completions; None if there are none.

    Source: Chu et al. 2025, GPG, arXiv:2504.02546, alpha. verl counts the rewards that are not 0 instead.
    """
    scores, group, counts = _grouped(rewards, groups)
    largest = scores.new_full((len(counts),), float("-inf")).scatter_reduce(0, group, scores, "amax")
    smallest = scores.new_full((len(counts),), float("inf")).scatter_reduce(0, group, scores, "amin")
    # Compared exactly, and not by a variance, which rounding may leave above 0 for equal rewards.
    teaching = (largest != smallest)[group].sum().double()
    total, useful = (reduce or _alone)(torch.stack([teaching.new_tensor(float(len(scores))), teaching]))
    return total / useful.clamp(min=1)


def pass_at_k(rewards: Numbers, groups: Numbers, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """Return `[B]`: for the best completion of each group, its distance to the second best; 0 for all others.

    This is the advantage if a policy is scored by its best completion to a prompt. Tied best completions have an advantage of 0.

    Args:
        rewards: `[B]`, the reward of each completion.
        groups: `[B]` int64, the same number for all completions to one prompt.
        scale: Whether to divide by the group's standard deviation.
        eps: A small constant that prevents a division by zero.

    Source: Tang et al. 2025, arXiv:2503.19595; a completion without others in its group has an advantage of 0.
    """
    scores, group, counts = _grouped(rewards, groups)
    scores64 = scores.double()
    low = torch.full((len(counts),), float("-inf"), dtype=torch.float64, device=scores.device)
    best = low.scatter_reduce(0, group, scores64, "amax")
    is_best = scores64 == best[group]
    ties = torch.zeros_like(low).index_add(0, group, is_best.double())
    # The best ones are left out; in a group of one nothing remains, and minus infinity is replaced below.
    second = low.scatter_reduce(0, group, torch.where(is_best, low[group], scores64), "amax")
    gap = torch.where((ties == 1) & (counts > 1), best - second, torch.zeros_like(best))
    if scale:
        n = counts.double()
        mean = torch.zeros_like(n).index_add(0, group, scores64) / n
        variance = torch.zeros_like(n).index_add(0, group, (scores64 - mean[group]) ** 2) / (n - 1).clamp(min=1)
        gap = gap / (variance.sqrt() + eps)
    return torch.where(is_best, gap[group], torch.zeros_like(scores64)).to(scores.dtype)


def optimal_token_baseline(
    rewards: Numbers,
    groups: Numbers,
    old_log_probs: Numbers,
    sum_squared_probs: Numbers,
    mask: Numbers,
    weights: Numbers | None = None,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Compute returns minus a baseline per token position of a group, which weights completions by the size of their gradients.

    The weight of a completion at a token is the sum of 1 - 2 p + sum of p^2 over its tokens so far: the squared norm of the gradient of
    their log-probabilities with respect to the logits. Beyond the second longest completion of a group the baseline is 0.

    Args:
        rewards: `[B, R]`, the reward of each token, including penalties.
        groups: `[B]` int64, the same number for all completions to one prompt.
        old_log_probs: `[B, R]`, log p of each token under the policy that generated it.
        sum_squared_probs: `[B, R]`, the sum over the vocabulary of the squared probabilities.
        mask: `[B, R]`, the mask of the completion tokens.
        weights: `[B, R]`, importance weights, whose squares multiply the weights; None for no importance weights.
        eps: A small constant that prevents a division by zero.

    Returns:
        The advantages `[B, R]` and the returns `[B, R]`. A completion without others in its group has its return as advantage.

    Source: the estimator `optimal_token_baseline` of verl. Its weights approximate, for each token, the minimum-variance baseline of
    Weaver and Tao 2001, arXiv:1301.2315.
    """
    response_mask = _mask(mask)
    returns = discounted_returns(rewards, mask).double()
    log_p, squares = (
        _numbers(name, values, response_mask.shape, response_mask).double()
        for name, values in (("old_log_probs", old_log_probs), ("sum_squared_probs", sum_squared_probs))
    )
    # At least (1 - p)^2, except for rounding: `squares` and p come from different computations.
    norms = (1 - 2 * log_p.exp() + squares).clamp(min=0)
    if weights is not None:
        norms = norms * _numbers("weights", weights, response_mask.shape, response_mask).double() ** 2
    norms = torch.where(response_mask, norms, 0.0)
    # Up to and including the token; masked tokens add nothing.
    energy = torch.where(response_mask, norms.cumsum(1), 0.0)
    # Only the groups are needed here; the numbers serve to check the shapes.
    _, group, counts = _grouped(returns[:, 0] if returns.shape[1] else returns.new_zeros(len(returns)), groups)
    sums = returns.new_zeros(len(counts), returns.shape[1])
    total, weighed = (sums.index_add(0, group, values) for values in (energy, energy * returns))
    present = sums.index_add(0, group, response_mask.double())
    # If only one completion is left, there is nothing to compare it with.
    baselines = torch.where(present > 1, weighed / (total + eps), torch.zeros_like(total))[group]
    dtype = torch.promote_types(_tensor("rewards", rewards).dtype, torch.float32)
    advantages = torch.where(response_mask, returns - baselines, 0.0)
    return advantages.to(dtype), returns.to(dtype)


def broadcast_to_tokens(values: Numbers, mask: Numbers) -> Tensor:
    """Return `[B, R]`: each completion's advantage `[B]` at each of its tokens."""
    response_mask = _mask(mask)
    advantages = _numbers("advantages", values, response_mask.shape[:1], response_mask.any(1))
    return torch.where(response_mask, advantages[:, None], 0.0)


def _alone(values: Tensor) -> Tensor:
    return values


def _tensor(name: str, values: Numbers) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as e:
        raise BatchError(
            f"{name} cannot be converted to a tensor ({str(e).splitlines()[0]}); it must hold numbers, in rows of equal length"
        ) from e


def _mask(mask: Numbers) -> Tensor:
    response_mask = _tensor("mask", mask) > 0
    if response_mask.dim() != 2:
        raise BatchError(f"mask is {list(response_mask.shape)}; it must be [B, R], one row per completion")
    return response_mask


def _numbers(name: str, values: Numbers, shape: torch.Size, used: Tensor) -> Tensor:
    """Return the values as floats of at least 32 bits, with unused positions set to 0."""
    numbers = _tensor(name, values)
    if numbers.shape != shape:
        raise BatchError(f"{name} is {list(numbers.shape)}; it must be {list(shape)}")
    numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    wrong = (~torch.isfinite(numbers) & used).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        place = f"at token {index[1]} of" if len(index) > 1 else "for"
        raise BatchError(f"{name} has {float(numbers[tuple(index)])} {place} completion {index[0]}; it must be finite there")
    # Not a product with the mask: 0 * NaN is NaN.
    return torch.where(used, numbers, 0.0)


def _grouped(rewards: Numbers, groups: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rewards, the index of each completion's group, and the sizes of the groups."""
    ids, scores = _tensor("groups", groups), _tensor("rewards", rewards)
    if ids.numel() and not is_integer(ids):
        raise BatchError(f"groups is {str(ids.dtype).removeprefix('torch.')}; it must hold integers, one per prompt")
    if scores.dim() != 1:
        raise BatchError(f"rewards is {list(scores.shape)}; it must be [B], one number per completion")
    if ids.shape != scores.shape:
        raise BatchError(f"groups is {list(ids.shape)}; it must be {list(scores.shape)}, one number per reward [B]")
    scores = _numbers("rewards", scores, scores.shape, torch.ones_like(scores, dtype=torch.bool))
    # Group ids may be any integers; the results below index groups from 0.
    _, group, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return scores, group, counts
