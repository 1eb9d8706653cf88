"""weightlane inside TRL: GRPO trainers publish every version of their weights to stock vLLM servers, while these generate.

`AsyncGRPOTrainer` takes the weight transfer as an argument::

    trainer = AsyncGRPOTrainer(..., weight_transfer=WeightlaneTransfer("http://127.0.0.1:8000"))

`GRPOTrainer` with ``vllm_mode="server"`` makes its own client of the server, which `use_weightlane` replaces::

    with use_weightlane():
        trainer = GRPOTrainer(..., args=GRPOConfig(..., use_vllm=True, vllm_mode="server"))

Importing this package imports neither TRL nor vLLM.
"""

from .grpo import use_weightlane
from .transfer import WeightlaneTransfer

__all__ = ["WeightlaneTransfer", "use_weightlane"]
