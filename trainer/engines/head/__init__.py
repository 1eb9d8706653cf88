"""The language-model head without full logits: log-probabilities of targets, entropies, and the most probable tokens.

No float32 tensor of [tokens, vocabulary] ever exists, neither forward nor backward: logits are computed in pieces, reduced and
freed, and computed again for the gradient. Each rank may hold only some rows of the head (vocabulary parallelism).

>>> import torch
>>> from weightlane.trainer.engines.head import head_outputs
>>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
>>> weight = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]], requires_grad=True)
>>> outputs = head_outputs(hidden, weight, torch.tensor([1, 2]), entropy=True, top_k=2)
>>> outputs.logprobs
tensor([-0.2395, -0.0949], grad_fn=<SumBackward1>)
>>> outputs.top_tokens
tensor([[1, 0],
        [2, 0]])
"""

from .outputs import HeadOutputs, head_outputs
from .pass_query import PassQuery
from .terms import LogitTransform, VocabularyShare

__all__ = ["HeadOutputs", "LogitTransform", "PassQuery", "VocabularyShare", "head_outputs"]
