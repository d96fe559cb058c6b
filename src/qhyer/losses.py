"""Each formula once, as a pure function. Reductions are explicit: means are taken over what is valid."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from qhyer import distributed


def shares(valid: Tensor) -> Tensor:
    """What each entry counts in the mean over the entries where `valid` is one: nothing where it is not, and nothing
    anywhere if there is none.

    Where processes share a batch, their counts differ: divided by the mean count, their results average to the mean.
    """
    valid = valid.float()
    return valid / distributed.mean(valid.sum()).clamp(min=1.0 / distributed.world())


def masked_mean(x: Tensor, share: Tensor) -> Tensor:
    """Mean of x, each entry counting for its share (same shape)."""
    return (x * share).sum()


def weighted(weight: float, loss: Tensor) -> Tensor:
    """weight * loss; a weight of one is no multiplication, forward or backward."""
    return loss if weight == 1.0 else weight * loss


def expectile(u: Tensor, tau: float) -> Tensor:
    """Eq. (9): L^2_tau(u) = |tau - 1(u < 0)| u^2, u = target - prediction; tau > 1/2 leans to the maximum."""
    weight = torch.where(u < 0, 1.0 - tau, tau)
    return weight * u.square()


def expectile_by(advantage: Tensor, error: Tensor, tau: float) -> Tensor:
    """(tau where A >= 0, else 1 - tau) error^2: the expectile, its sign read off an advantage of its own."""
    return torch.where(advantage < 0, 1.0 - tau, tau) * error.square()


def quantile(u: Tensor, tau: float) -> Tensor:
    """Pinball loss: |tau - 1(u < 0)| |u|, the L1 sibling of the expectile."""
    weight = torch.where(u < 0, 1.0 - tau, tau)
    return weight * u.abs()


def mse(u: Tensor) -> Tensor:
    """u^2: what the expectile is, up to a factor 2, at tau = 1/2."""
    return u.square()


def gaussian_nll(mean: Tensor, target: Tensor, std: float = 1.0) -> Tensor:
    """-log N(target; mean, std^2 I), summed over the last dimension."""
    squares = F.mse_loss(mean, target, reduction="none").sum(-1)  # one kernel for the squares, one for their gradient
    return 0.5 / std**2 * squares + mean.shape[-1] * (math.log(std) + 0.5 * math.log(2 * math.pi))


def mixture_nll(logits: Tensor, means: Tensor, log_stds: Tensor, target: Tensor) -> Tensor:
    """-log sum_k pi_k N(target; mean_k, diag std_k^2): logits (..., M), means, log_stds (..., M, d), target (..., d)"""
    squares = ((target[..., None, :] - means) * torch.exp(-log_stds)).square()
    log_p = -(0.5 * squares + log_stds + 0.5 * math.log(2 * math.pi)).sum(-1)  # (..., M)
    return -torch.logsumexp(torch.log_softmax(logits, -1) + log_p, -1)


def gelu(x: Tensor) -> Tensor:
    """The tanh form, which is what flax (and so OGBench) calls gelu."""
    return F.gelu(x, approximate="tanh")


def awr_weight(advantage: Tensor, temperature: float, cap: float = 100.0) -> Tensor:
    """min(exp(alpha A), cap), without gradient: what a sample counts in advantage-weighted regression."""
    return (temperature * advantage.detach()).exp().clamp(max=cap)


def awr(name: str, mean: Tensor, target: Tensor, advantage: Tensor, alpha: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-E[min(exp(alpha A), 100) log N(target; mean, I)], and what is worth logging of it, under this name."""
    weight = awr_weight(advantage, alpha)
    loss = (weight * gaussian_nll(mean, target)).mean()
    return loss, {
        f"{name}/loss": loss.detach(),
        f"{name}/mse": F.mse_loss(mean.detach(), target),
        f"{name}/advantage": advantage.mean(),
        f"{name}/weight": weight.mean(),
    }


def ddpg_bc(q: Tensor, nll: Tensor, alpha: float) -> Tensor:
    """-mean(q) / mean|q| + alpha mean(-log pi(a)): climb q, stay near the data.

    Divided by its own magnitude (no gradient), q's scale does not matter, and alpha means the same everywhere.
    """
    scale = distributed.mean(q.detach().abs().mean()) + 1e-6
    return -q.mean() / scale + alpha * nll.mean()


def push_apart(distance: Tensor, reach: float = 500.0, softness: float = 100.0) -> Tensor:
    """E[100 softplus(5 - d / 100)]: pairs are pushed apart until they are about `reach` steps apart, and less and less
    from `softness` before it on."""
    return (softness * F.softplus((reach - distance) / softness)).mean()


def binary_nce(logits: Tensor) -> Tensor:
    """Mean binary cross-entropy of a table (..., B, B) whose diagonal is positive and the rest negative.

    With label y it is softplus(l) - y l, so that the labels need not be written down.
    """
    return F.softplus(logits).mean() - logits.diagonal(dim1=-2, dim2=-1).mean() / logits.shape[-1]


def diagonal_nll(mean: Tensor, log_std: Tensor, target: Tensor) -> Tensor:
    """-log N(target; mean, diag exp(log_std)^2), summed over the last dimension; log_std is broadcast."""
    squares = ((target - mean) * torch.exp(-log_std)).square()
    return (0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def asymmetry(u: Tensor, tau: float) -> Tensor:
    """|tau - 1(u < 0)| / max(tau, 1 - tau): the expectile's weight, one on the side that counts more."""
    return torch.where(u < 0, 1.0 - tau, tau) / max(tau, 1.0 - tau)


def discounted(rewards: Tensor, discount: float) -> Tensor:
    """sum_u discount^u r_u over the last dimension."""
    powers = discount ** torch.arange(rewards.shape[-1], device=rewards.device, dtype=rewards.dtype)
    return (rewards * powers).sum(-1)


def hl_gauss(y: Tensor, edges: Tensor, std: float) -> Tensor:
    """Masses (..., m) that N(y, std^2), cut to the whole range, has in the bins between edges (m + 1,): a number as a
    histogram (Imani and White, 2018). A y (...) beyond the range counts as its end."""
    y = y.clamp(edges[0], edges[-1])[..., None]
    below = torch.erf((edges - y) / (std * math.sqrt(2.0)))  # twice the mass below each edge, up to a constant
    return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


def cross_entropy(logits: Tensor, masses: Tensor) -> Tensor:
    """-sum_i p_i log q_i over the last dimension, p the masses and q those of the logits."""
    return -(masses * torch.log_softmax(logits, -1)).sum(-1)
