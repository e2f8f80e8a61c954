"""What training minimises: the loss of the text, and what keeps the routers in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of each token given those before it: (row, position).

    `labels` are the tokens themselves, -100 where none is predicted; there, and at position 0, the loss is 0.
    """
    following = pad(labels[:, 1:], (0, 1), value=-100)  # shorter than a copy of the logits
    losses = cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="none")
    return pad(losses.view_as(labels)[:, :-1], (1, 0))


@dataclass(frozen=True, kw_only=True)
class RouterLosses:
    """Of the routers of one forward; every execution counts once, a layer with several visits several times."""

    balance: Tensor
    z: Tensor
    load: Tensor  # (execution, expert), tokens that chose the expert


def router_losses(router_logits: Sequence[Tensor], real: Tensor, *, top_k: int) -> RouterLosses:
    """The routers' losses over the tokens that are `real`, no padding: (row, position) bool.

    `router_logits` has (tokens, E) for each execution. With f_i the mean number of a token's k choices that fall on expert
    i, and P_i the mean probability of i, `balance` is the mean over executions of E sum_i f_i P_i: k where all experts
    are used alike, up to E where only k are. `z` is the mean over executions and tokens of (log sum_i exp logit_i)^2.

    transformers' loss takes f and P over all executions together. There an expert that one layer overuses is made up
    for by its namesake in another layer, and collapsed routers can look balanced; here each execution is balanced
    by itself. With one execution the two are the same.
    Sources: Fedus et al., arXiv 2101.03961 (balance); Zoph et al., arXiv 2202.08906 (z).
    """
    logits = torch.stack(tuple(router_logits)).float()  # (execution, token, expert)
    counted = real.flatten().float()  # (token,)
    tokens = counted.sum()
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices.flatten(1)  # (execution, token x k)
    load = torch.zeros_like(logits[:, 0]).scatter_add_(
        1, chosen, counted.repeat_interleave(top_k).expand_as(chosen)
    )
    mean_probability = (probabilities * counted[:, None]).sum(1) / tokens  # (execution, expert)
    balance = logits.shape[-1] * (load / tokens * mean_probability).sum(1).mean()
    z = (logits.logsumexp(-1) ** 2 * counted).sum(1).mean() / tokens
    return RouterLosses(balance=balance, z=z, load=load)
