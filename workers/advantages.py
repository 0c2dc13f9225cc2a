"""From rewards to advantages. Pure functions over padded answers.

Axes: B answers, R tokens of the longest one. `mask` `[B, R]` is 1 where an answer has a token of its own; results are 0
elsewhere, whatever stands there. Lists of numbers are taken as tensors; integers and 16-bit floats are computed in float32. A number
that is not finite, where it would be used, is an error that names its answer.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..engine.errors import BatchError
from ..engine.packing.batch import is_integer

Numbers: TypeAlias = Tensor | Sequence[float] | Sequence[Sequence[float]]
"""A tensor, or lists that make one."""


def token_rewards(rewards: Numbers, mask: Numbers, kl: Numbers | None = None, kl_coef: float = 0.0) -> Tensor:
    """`[B, R]`: an answer's reward at its last token, less a penalty for leaving the reference at every token.

    Args:
        rewards: `[B]`.
        mask: `[B, R]`.
        kl: `[B, R]`, estimate of the distance, where there is a penalty.
        kl_coef: its weight.

    Source: Ouyang et al. 2022, arXiv:2203.02155, equation 2.
    """
    real = _mask(mask)
    given = _numbers("rewards", rewards, real.shape[:1], real.any(1))
    last = real & (real.long().cumsum(1) == real.long().sum(1, keepdim=True))
    found = torch.where(last, given[:, None], 0.0)
    return found if kl is None else found - kl_coef * _numbers("kl", kl, real.shape, real)


def gae(rewards: Numbers, values: Numbers, mask: Numbers, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
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
    real = _mask(mask)
    earned, worth = (_numbers(n, v, real.shape, real) for n, v in (("rewards", rewards), ("values", values)))
    worth = worth.to(torch.promote_types(earned.dtype, worth.dtype))
    advantages = torch.zeros_like(worth)
    following = worth.new_zeros(len(worth))
    carried = torch.zeros_like(following)
    for t in reversed(range(real.shape[1])):
        delta = earned[:, t] + gamma * following - worth[:, t]
        carried = torch.where(real[:, t], delta + gamma * lam * carried, carried)
        following = torch.where(real[:, t], worth[:, t], following)
        advantages[:, t] = torch.where(real[:, t], carried, 0.0)
    return advantages, advantages + worth


def whiten(values: Numbers, mask: Numbers, eps: float = 1e-8) -> Tensor:
    """Shifted and scaled to a mean of 0 and a variance of 1 over the tokens of all answers.

    Args:
        values: `[B, R]`.
        mask: `[B, R]`.
        eps: against division by zero.
    """
    real = _mask(mask)
    given = _numbers("values", values, real.shape, real)
    count = real.sum().clamp(min=1)
    mean = given.sum() / count
    apart = torch.where(real, given - mean, 0.0)
    variance = (apart**2).sum() / (count - 1).clamp(min=1)
    return apart * torch.rsqrt(variance + eps)


def grpo(rewards: Numbers, groups: Numbers, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """`[B]`: how much better an answer is than the others to its prompt.

    Args:
        rewards: `[B]`.
        groups: `[B]` int64, answers to one prompt have one number.
        scale: divide by the group's standard deviation; False is Dr. GRPO (arXiv:2503.20783).
        eps: against division by zero.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2. The deviation is the sample's (n - 1), as in the code of the paper's
    followers; an answer without others has 0.
    """
    given, which, counts = _grouped(rewards, groups)
    # In float32 the mean of equal rewards may differ from them, and that difference would be scaled up to a whole advantage.
    wide, n = given.double(), counts.double()
    mean = torch.zeros_like(n).index_add(0, which, wide) / n
    apart = wide - mean[which]
    if scale:
        variance = torch.zeros_like(n).index_add(0, which, apart**2) / (n - 1).clamp(min=1)
        apart = apart / (variance.sqrt()[which] + eps)
    return apart.to(given.dtype)


def rloo(rewards: Numbers, groups: Numbers) -> Tensor:
    """`[B]`: an answer's reward less the mean of the other answers to its prompt; 0 for an answer without others.

    Args:
        rewards: `[B]`.
        groups: `[B]` int64.

    Source: Ahmadian et al. 2024, arXiv:2402.14740, section 3.2.
    """
    given, which, counts = _grouped(rewards, groups)
    wide, n = given.double(), counts.double()[which]
    total = torch.zeros(len(counts), dtype=wide.dtype, device=wide.device).index_add(0, which, wide)[which]
    found = torch.where(n > 1, wide - (total - wide) / (n - 1).clamp(min=1), torch.zeros_like(wide))
    return found.to(given.dtype)


def reinforce_plus_plus(rewards: Numbers, mask: Numbers, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Whitened returns, without a critic.

    Args:
        rewards: `[B, R]`, by token, penalties included.
        mask: `[B, R]`.
        gamma: discount by token.

    Returns:
        advantages `[B, R]` and returns `[B, R]`.

    Source: Hu 2025, arXiv:2501.03262, section 3.
    """
    real = _mask(mask)
    _, returns = gae(rewards, torch.zeros(real.shape, device=real.device), real, gamma, 1.0)
    return whiten(returns, real), returns


def broadcast_to_tokens(values: Numbers, mask: Numbers) -> Tensor:
    """`[B, R]`: an answer's advantage `[B]` at each of its tokens."""
    real = _mask(mask)
    given = _numbers("advantages", values, real.shape[:1], real.any(1))
    return torch.where(real, given[:, None], 0.0)


def _tensor(name: str, values: Numbers) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError) as e:
        raise BatchError(
            f"{name} makes no tensor ({str(e).splitlines()[0]}); it must be numbers, in rows of one length"
        ) from e


def _mask(mask: Numbers) -> Tensor:
    real = _tensor("mask", mask) > 0
    if real.dim() != 2:
        raise BatchError(f"mask is {list(real.shape)}; it must be [B, R], one row for each answer")
    return real


def _numbers(name: str, values: Numbers, shape: torch.Size, used: Tensor) -> Tensor:
    """Floats of at least 32 bits, 0 where they are not used."""
    given = _tensor(name, values)
    if given.shape != shape:
        raise BatchError(f"{name} is {list(given.shape)}; it must be {list(shape)}")
    given = given.to(torch.promote_types(given.dtype, torch.float32))
    wrong = (~torch.isfinite(given) & used).nonzero()
    if len(wrong):
        at = wrong[0].tolist()
        place = f"at token {at[1]} of" if len(at) > 1 else "for"
        raise BatchError(f"{name} has {float(given[tuple(at)])} {place} answer {at[0]}; it must be finite there")
    return torch.where(used, given, 0.0)


def _grouped(rewards: Numbers, groups: Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards; the place of each answer's group among all; and the sizes of the groups."""
    numbers, given = _tensor("groups", groups), _tensor("rewards", rewards)
    if numbers.numel() and not is_integer(numbers):
        raise BatchError(
            f"groups is {str(numbers.dtype).removeprefix('torch.')}; it must be whole numbers, one for each prompt"
        )
    if given.dim() != 1:
        raise BatchError(f"rewards is {list(given.shape)}; it must be [B], one number for each answer")
    if numbers.shape != given.shape:
        raise BatchError(
            f"groups is {list(numbers.shape)}; it must be {list(given.shape)}, one number for each of the rewards [B]"
        )
    given = _numbers("rewards", given, given.shape, torch.ones_like(given, dtype=torch.bool))
    _, which, counts = torch.unique(numbers, return_inverse=True, return_counts=True)
    return given, which, counts
