"""`use_weightlane`: TRL's trainers with ``vllm_mode="server"`` send their weights through weightlane.

They offer no argument for it: ``trl.generation.vllm_generation.VLLMGeneration`` makes a ``VLLMClient``, by that name. Within the
block the name is a client that is TRL's own but for the three methods that carry weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightlane.sync import SyncConfig

from .transfer import WeightlaneTransfer


@contextmanager
def use_weightlane(
    *,
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    engine: str = "shm",
    options: Mapping[str, Any] | None = None,
    config: SyncConfig | None = None,
) -> Iterator[None]:
    """Let the trainers that are made in this block publish through weightlane, also after it. Every rank enters it.

    The server is the one of the trainer's own arguments. For the arguments here see `WeightlaneTransfer`; a trainer's own one is
    ``trainer.vllm_generation.vllm_client.transfer`` on rank 0.
    """
    from trl.generation import vllm_generation  # noqa: PLC0415 - TRL imports vLLM

    before = vllm_generation.VLLMClient

    class WeightlaneClient(before):  # type: ignore[misc,valid-type] # TRL is optional, and untyped
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.transfer = WeightlaneTransfer(
                self.base_url,
                tensor_parallel=tensor_parallel,
                dtype=dtype,
                engine=engine,
                options=options,
                config=config,
            )

        def init_communicator(self, device: torch.device | str | int = 0) -> None:
            """Do nothing, on any device: the first version connects."""

        def update_named_params(
            self,
            metadata: list[tuple[str, str, list[int]]],  # noqa: ARG002 - the tensors say it themselves
            named_params: Iterator[tuple[str, torch.Tensor]],
        ) -> None:
            """Publish all tensors of the model as the next version; see `WeightlaneTransfer.send_weights`."""
            self.transfer.send_weights(named_params)

        def close_communicator(self) -> None:
            """Disconnect from the server; the next version connects again."""
            self.transfer.destroy()

    vllm_generation.VLLMClient = WeightlaneClient
    try:
        yield
    finally:
        vllm_generation.VLLMClient = before
