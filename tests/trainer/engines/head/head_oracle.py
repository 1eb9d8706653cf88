"""The head by whole logits in float64, and a comparison of `head_outputs` with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.engines.head import LogitTransform, head_outputs


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
