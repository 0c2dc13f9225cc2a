"""From rewards to advantages. Pure functions over padded answers.

Axes: B answers, R tokens of the longest one. `mask` `[B, R]` is 1 where an answer has a token of its own; results are 0
elsewhere.
"""

import torch
from torch import Tensor

from ..engine.errors import BatchError


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """`[B, R]`: an answer's reward at its last token, less a penalty for leaving the reference at every token.

    Args:
        rewards: `[B]`.
        mask: `[B, R]`.
        kl: `[B, R]`, estimate of the distance, where there is a penalty.
        kl_coef: its weight.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2.
    """
    _check("rewards", rewards, mask.shape[:1])
    mask = mask.to(rewards.dtype)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (positions * (mask > 0)).argmax(1)
    found = torch.zeros_like(mask).scatter(1, last[:, None], rewards[:, None]) * mask
    return found if kl is None else found - kl_coef * kl * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, and the returns that the critic learns.

    A token that is masked inside an answer (a tool's) is stepped over: its neighbours follow each other.

    Args:
        rewards: `[B, R]`, by token.
        values: `[B, R]`, of the state in which the token was chosen.
        mask: `[B, R]`.
        gamma: discount by token.
        lam: lambda, weight of longer estimates.

    Returns:
        advantages `[B, R]` and returns `[B, R]`.

    Source: Schulman et al. 2016, arXiv:1506.02438, equations 11, 12 and 16.
    """
    _check("rewards", rewards, mask.shape)
    _check("values", values, mask.shape)
    real = mask > 0
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    carried = torch.zeros_like(following)
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        carried = torch.where(real[:, t], delta + gamma * lam * carried, carried)
        following = torch.where(real[:, t], values[:, t], following)
        advantages[:, t] = torch.where(real[:, t], carried, torch.zeros_like(carried))
    return advantages, torch.where(real, advantages + values, torch.zeros_like(values))


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shifted and scaled to a mean of 0 and a variance of 1 over the tokens of all answers.

    Args:
        values: `[B, R]`.
        mask: `[B, R]`.
        eps: against division by zero.
    """
    _check("values", values, mask.shape)
    weight = mask.to(values.dtype)
    count = weight.sum().clamp(min=1)
    mean = (values * weight).sum() / count
    variance = ((values - mean) ** 2 * weight).sum() / (count - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + eps) * weight


def grpo(rewards: Tensor, groups: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """`[B]`: how much better an answer is than the others to its prompt.

    Args:
        rewards: `[B]`.
        groups: `[B]` int64, answers to one prompt have one number.
        scale: divide by the group's standard deviation; False is Dr. GRPO (arXiv:2503.20783).
        eps: against division by zero.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The deviation is the sample's (n - 1), as in the code of the paper's
    followers; an answer without others has 0.
    """
    _check("groups", groups, rewards.shape)
    _, which, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    # In float32 the mean of equal rewards may differ from them, and that difference would be scaled up to a whole advantage.
    wide, n = rewards.double(), counts.double()
    mean = torch.zeros_like(n).index_add(0, which, wide) / n
    apart = wide - mean[which]
    if scale:
        variance = torch.zeros_like(n).index_add(0, which, apart**2) / (n - 1).clamp(min=1)
        apart = apart / (variance.sqrt()[which] + eps)
    return apart.to(torch.promote_types(rewards.dtype, torch.float32))


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """`[B]`: an answer's reward less the mean of the other answers to its prompt; 0 for an answer without others.

    Args:
        rewards: `[B]`.
        groups: `[B]` int64.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2.
    """
    _check("groups", groups, rewards.shape)
    _, which, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    wide, n = rewards.double(), counts.double()[which]
    total = torch.zeros(len(counts), dtype=wide.dtype, device=wide.device).index_add(0, which, wide)[which]
    found = torch.where(n > 1, wide - (total - wide) / (n - 1).clamp(min=1), torch.zeros_like(wide))
    return found.to(torch.promote_types(rewards.dtype, torch.float32))


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Whitened returns, without a critic.

    Args:
        rewards: `[B, R]`, by token, penalties included.
        mask: `[B, R]`.
        gamma: discount by token.

    Returns:
        advantages `[B, R]` and returns `[B, R]`.

    Source: Hu 2025, arXiv:2501.03262, section 3.
    """
    zeros = torch.zeros_like(rewards)
    _, returns = gae(rewards, zeros, mask, gamma, 1.0)
    return whiten(returns, mask), returns


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """`[B, R]`: an answer's advantage `[B]` at each of its tokens."""
    _check("advantages", values, mask.shape[:1])
    return values[:, None] * mask.to(values.dtype)


def _check(name: str, values: Tensor, shape: torch.Size) -> None:
    if values.shape != shape:
        raise BatchError(f"{name} is {list(values.shape)}; it must be {list(shape)}")
