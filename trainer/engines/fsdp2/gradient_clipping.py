"""`clip_gradients`: scales the gradients of all ranks down to a global norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def clip_gradients(parameters: Sequence[torch.nn.Parameter], most: float) -> float:
    """Scale gradients down to a global L2 norm of at most `most`. Returns the norm before. Collective.

    Gradients are grouped by mesh, because torch's own `clip_grad_norm_` takes one mesh only.
    """
    groups: dict[object, list[torch.Tensor]] = defaultdict(list)
    for grad in (parameter.grad for parameter in parameters):
        if grad is not None:
            groups[grad.device_mesh if isinstance(grad, DTensor) else None].append(grad)
    norms = []
    for group in groups.values():
        norm = get_total_norm(group)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for group in groups.values() for grad in group]
    if shards:  # scaled as by torch's `clip_grads_with_norm_`
        torch._foreach_mul_(shards, torch.clamp(most / (total + 1e-6), max=1.0))
    return float(total)
