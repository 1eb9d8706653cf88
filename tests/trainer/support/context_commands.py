"""Commands of `engine_worker` that compare ranks which share the tokens of a row with transformers in float64."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from weightlane.trainer.data.sequences import MicroBatch, TokenSequence
from weightlane.trainer.engines import rank_collectives
from weightlane.trainer.engines.fsdp2.loading import materialise
from weightlane.trainer.engines.fsdp2.shards import trained_slices
from weightlane.trainer.engines.head import PassQuery
from weightlane.trainer.engines.hf import checkpoint
from weightlane.trainer.engines.hf.context_split import split_layout
from weightlane.trainer.engines.hf.heads import HeadQuery, replace_head
from weightlane.trainer.engines.hf.layout import Layout
from weightlane.trainer.engines.hf.packed_attention import pack_attention
from weightlane.trainer.engines.rank_collectives import ContextRanks

ROWS = {
    "prefixes, windows and one token": (45, 1, 12, 23, 26, 23),
    "fewer tokens than ranks": (1,),
    "many short ones": tuple(1 + number * 7 % 5 for number in range(40)),
    "one long one": (101,),
}
"""Lengths of the sequences of a row. Where there are as many, the last three begin with the same 20 tokens."""
_SHARED, _TOP = 20, 3


class ContextCommands:
    """A part of the worker."""

    _rank: int
    _world: int
    join: Callable[[], None]
    close: Callable[[], None]
    train: Callable[[int, int], object]

    def die_in_gather(self, number: int) -> None:
        """Take a step in which this process is killed when it gathers keys for the `number`th time."""
        counted = itertools.count(1)
        gather = rank_collectives._ALL_GATHER

        def counting(*arguments: Any, **named: Any) -> None:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            gather(*arguments, **named)

        rank_collectives._ALL_GATHER = counting
        self.train(1, 1)

    def share_rows(self, model: str, vocabulary: int, kind: str) -> dict[str, float]:
        """Compute all `ROWS` together with the other ranks, and alone with transformers' class `kind`.

        Returns the largest differences: of hidden states; of log-probabilities, entropies and top-k, relative to the largest
        logit if that is above 1; and of gradients, relative to the length of the gradient of all parameters. Empty but on rank 0.
        """
        self.close()
        self.join()
        mine = checkpoint.model_without_weights(Path(model))
        runs = checkpoint.checkpoint_runs(mine, checkpoint.checkpoint_tensors(mine))
        materialise(mine, torch.device("cpu"))
        fill = checkpoint.weights_reader(Path(model), "tokens", {run.name: run.shape for run in runs})
        fill(trained_slices(runs, checkpoint.checkpoint_tensors(mine), {}))
        ordinary = getattr(transformers, kind).from_pretrained(model).eval()
        for each in (mine, ordinary):
            each.double().set_experts_implementation("eager")
        pack_attention(mine)
        replace_head(mine)
        ranks = ContextRanks(dist.group.WORLD, self._rank, self._world)
        off: dict[str, float] = {}
        for number, lengths in enumerate(ROWS.values()):
            for name, difference in _differences(mine, ordinary, lengths, vocabulary, number, ranks).items():
                off[name] = max(difference, off.get(name, 0.0))
        return off


def _differences(
    model: torch.nn.Module,
    ordinary: torch.nn.Module,
    lengths: tuple[int, ...],
    vocabulary: int,
    seed: int,
    ranks: ContextRanks,
) -> dict[str, float]:
    random = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, vocabulary, (2, length), generator=random) for length in lengths]
    if len(lengths) == 6:
        for tokens, _ in drawn[-2:]:
            tokens[:_SHARED] = drawn[-3][0][:_SHARED]
    micro = MicroBatch.of([TokenSequence(tokens, targets) for tokens, targets in drawn])
    weights = torch.randn(2, len(micro.tokens), generator=random)
    query = PassQuery(torch.arange(len(micro.tokens)), entropy=True, top_k=_TOP, hidden=True)
    layout = split_layout(Layout.packed([micro], share=True), ranks)
    model.zero_grad()
    found = model(HeadQuery(query, micro, layout.places, ranks), **layout.inputs)
    ((found["logprobs"] * weights[0]).sum() + (found["entropy"] * weights[1]).sum()).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    if ranks.index:
        return {}
    ordinary.zero_grad()
    hidden: list[torch.Tensor] = []
    head = ordinary.get_output_embeddings()  # type: ignore[operator]  # of transformers' PreTrainedModel
    hook = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0]))
    logits = [ordinary(input_ids=tokens[None], use_cache=False).logits[0] for tokens in micro.split(micro.tokens)]
    hook.remove()
    whole = torch.log_softmax(torch.cat(logits), -1)
    largest = max(1.0, float(torch.cat(logits).detach().abs().max()))
    wanted = {
        "hidden": torch.cat(hidden),
        "logprobs": whole.gather(1, micro.targets[:, None])[:, 0],
        "entropy": -(whole.exp() * whole).sum(1),
        "top_logprobs": whole.topk(_TOP).values,
    }
    ((wanted["logprobs"] * weights[0]).sum() + (wanted["entropy"] * weights[1]).sum()).backward()
    assert torch.equal(found["top_tokens"], whole.topk(_TOP).indices)
    theirs = {name: each.grad for name, each in ordinary.named_parameters() if each.grad is not None}
    assert gradients.keys() == theirs.keys()
    length = torch.stack([each.norm() for each in theirs.values()]).norm()
    off = {name: float((found[name].detach() - each.detach()).abs().max()) for name, each in wanted.items()}
    off = {name: difference / (largest if name != "hidden" else 1.0) for name, difference in off.items()}
    return off | {"gradient": max(float((gradients[name] - each).norm() / length) for name, each in theirs.items())}
