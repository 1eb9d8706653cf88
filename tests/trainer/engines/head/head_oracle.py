"""The head by whole logits in float64, and comparisons of `head_outputs` and of the keys of the largest logits with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.engines.head import LogitTransform, chunks, cuda_kernels, head_outputs
from weightlane.trainer.engines.head.terms import HeadTerms
from weightlane.trainer.engines.head.top_tokens import best_keys


@dataclass(frozen=True)
class Case:
    """Sizes and options of a comparison."""

    rows: int
    width: int
    vocabulary: int
    labels: tuple[int, ...]
    """The shape of a row's targets."""
    transform: LogitTransform
    further: bool
    """Whether there are a bias and temperatures."""
    entropy: bool
    top_k: int
    chunk_bytes: int = 2**20


def compare(
    case: Case, device: str, dtype: torch.dtype, *, values: float = 2e-5, slopes: float = 2e-6, strided: bool = False
) -> None:
    """Assert that values are within `values` of the oracle's and gradients within `slopes` of theirs, relative to their norm.

    Targets and their order vary over rows; every seventh is ignored. With `strided`, hidden states and weight are parts of wider
    tensors.
    """
    random_of = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random_of)

    hidden, weight = draw(case.rows, case.width), draw(case.vocabulary, case.width) / case.width**0.5 * 3
    parts = [hidden.to(dtype), weight.to(dtype), *([draw(case.vocabulary).to(dtype)] if case.further else [])]
    temperatures = torch.rand(case.rows, generator=random_of) + 0.5 if case.further else None
    targets = torch.randint(case.vocabulary, (case.rows, *case.labels), generator=random_of)
    targets[::7] = IGNORED
    by_logprob, by_entropy = draw(*targets.shape), draw(case.rows) * case.entropy

    exact = [part.double().requires_grad_() for part in parts]
    logits = case.transform(torch.nn.functional.linear(*exact))
    logs = torch.log_softmax(logits if temperatures is None else logits / temperatures[:, None].double(), -1)
    chosen = logs.gather(1, targets.clamp(min=0).view(case.rows, -1 if case.rows else 1)).view(targets.shape)
    logprobs, entropy = torch.where(targets != IGNORED, chosen, 0.0), -(logs.exp() * logs).sum(1)
    ((logprobs * by_logprob).sum() + (entropy * by_entropy).sum()).backward()
    best = logs.detach().topk(case.top_k)

    mine = [part.to(device, copy=True) for part in parts]
    if strided:
        mine[:2] = [torch.cat([part, part], dim=1)[:, : case.width] for part in mine[:2]]
    mine = [part.requires_grad_() for part in mine]
    found = head_outputs(
        mine[0],
        mine[1],
        targets.to(device),
        entropy=case.entropy,
        top_k=case.top_k,
        bias=mine[2] if case.further else None,
        temperatures=None if temperatures is None else temperatures.to(device),
        transform=case.transform,
        chunk_bytes=case.chunk_bytes,
    )
    assert {each.dtype for each in (found.logprobs, found.entropy, found.top_logprobs)} == {torch.float32}
    near = {"atol": values, "rtol": values}
    torch.testing.assert_close(found.logprobs.double().cpu(), logprobs.detach(), **near)
    torch.testing.assert_close(found.entropy.double().cpu(), entropy.detach() * case.entropy, **near)
    torch.testing.assert_close(found.top_logprobs.double().cpu(), best.values, **near)
    assert found.top_tokens.sort(1).values.diff(dim=1).all(), "each token once"
    # Tokens whose exact log-probabilities are closer than that may be in another order.
    torch.testing.assert_close(logs.detach().gather(1, found.top_tokens.cpu()), best.values, **near)
    ((found.logprobs * by_logprob.to(device)).sum() + (found.entropy * by_entropy.to(device)).sum()).backward()
    for left, right in zip(mine, exact, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert left.grad.dtype == dtype
        difference = (left.grad.double().cpu() - right.grad).norm()
        assert float(difference) <= slopes * float(right.grad.norm()) + 1e-7, (case, left.shape, float(difference))


def compare_keys(
    vocabulary: int,
    top_k: int,
    transform: LogitTransform,
    device: str,
    dtype: torch.dtype,
    further: bool,
    first: int = 0,
) -> None:
    """Assert that the programs keep the keys that `best_keys` finds in whole logits, bit for bit.

    Whole numbers make the logits, and many are equal. Without a soft cap they are exact on a CPU, and torch computes them.
    Otherwise they are the programs' own: every token is a label. A bias, of `further`, excludes one token.
    """
    random_of = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randint(-2, 3, shape, generator=random_of).to(dtype)
        for shape in ((70, 3), (vocabulary, 3), (vocabulary,))
    )
    bias[vocabulary // 2] = -torch.inf
    parts = [hidden, weight, *((bias, torch.rand(70, generator=random_of) + 0.5) if further else (None, None))]
    terms = HeadTerms(*(None if part is None else part.to(device) for part in parts), transform)
    exact = device == "cpu" and transform.softcap is None
    options: dict[str, Any] = {"entropy": True, "first": first, "chunk_bytes": 2**20}
    labels = torch.arange(0 if exact else vocabulary, device=device).expand(70, -1)
    found = cuda_kernels.forward(terms, labels[:, :0], top_k=top_k, **options)
    without = cuda_kernels.forward(terms, labels, top_k=0, **options)
    of_torch = chunks.forward(terms, labels, top_k=top_k, **options).best if exact else None
    expected = best_keys(without.chosen, top_k, first) if of_torch is None else of_torch
    assert torch.equal(found.best, expected), (found.best, expected)
    if device == "cpu":  # elsewhere a compiler may round the sums of one program otherwise than those of another
        assert torch.equal(found.log_sum, without.log_sum)
        assert torch.equal(found.entropy, without.entropy)
