"""`clip_gradients`: scales the gradients of all ranks down to a global norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_gradients(parameters: Sequence[torch.nn.Parameter], most: float) -> float:
    """Scale gradients down to a global L2 norm of at most `most`. Returns the norm before. Collective.

    Parameters are grouped by mesh, because torch's own `clip_grad_norm_` takes one mesh only.
    """
    groups: dict[object, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = []
    for group in groups.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    for group in groups.values():
        clip_grads_with_norm_(group, most, total)
    return float(total)
