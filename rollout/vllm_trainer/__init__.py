"""vLLM's trainer half of weight transfer, under the name ``weightlane``: for programs that are written for vLLM's own engines.

vLLM's factory makes the engine from its init info, and importing this package registers it. A program that was written for
``nccl`` changes two names::

    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
    from weightlane.rollout.vllm_trainer import WeightlaneTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=WeightlaneTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()  # the server serves the new version when this returns

`trainer_engine` is the engine, `source_shards` lists what a trainer rank publishes of a source, and `client_replica` is a vLLM
behind a client as the coordinator sees it. Unlike `weightlane.rollout`, this package imports vLLM.
"""

from contextlib import suppress

from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from .trainer_engine import WeightlaneTrainerInitInfo, WeightlaneTrainerWeightTransferEngine

__all__ = ["WeightlaneTrainerInitInfo", "WeightlaneTrainerWeightTransferEngine"]

with suppress(ValueError):  # registered by weightlane's plugin in this process
    WeightTransferTrainerFactory.register_engine(
        WeightlaneTrainerInitInfo.backend, WeightlaneTrainerWeightTransferEngine
    )
