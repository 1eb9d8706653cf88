"""`WeightlaneClient`: TRL's client of a vLLM server, which sends weights through weightlane. Importing it imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from trl.generation.vllm_client import VLLMClient

from .transfer import WeightlaneTransfer


class WeightlaneClient(VLLMClient):  # type: ignore[misc,unused-ignore] # TRL is optional, and untyped
    """TRL's own ``VLLMClient``, but for the methods that carry weights.

    Args:
        make: Makes the transfer to the server at an address.
        args: For TRL's client.
        kwargs: For TRL's client.
    """

    def __init__(self, make: Callable[[str], WeightlaneTransfer], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.transfer = make(self.base_url)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing, on any device: the first version connects."""

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Publish all tensors of the model as the next version; see `WeightlaneTransfer.send_weights`."""
        del metadata  # the tensors say it themselves
        self.transfer.send_weights(named_params)

    def close_communicator(self) -> None:
        """Disconnect from the server; the next version connects again."""
        self.transfer.destroy()
