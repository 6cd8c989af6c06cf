"""AdamW with weight decay on matrices only, the learning rate, and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sagesim.experiments.pretrain.run.distributed import full_tensor
from sagesim.experiments.pretrain.run.settings import Run


def adamw(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """The optimizer of a run. Source: Loshchilov and Hutter, arXiv 1711.05101."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": run.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = all(p.is_cuda for p in trained)
    return torch.optim.AdamW(groups, lr=run.lr, betas=(run.beta1, run.beta2), fused=on_gpu)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale the gradients to a norm of at most `largest`.

    Returns:
        The norm before scaling, a scalar with the same bits in every process.
    """
    return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, largest))
