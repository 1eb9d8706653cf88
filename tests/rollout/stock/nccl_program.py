"""A trainer as one writes it for vLLM's ``nccl`` backend: nothing here knows of weightlane.

    python nccl_program.py URL MODEL...

Every MODEL is a checkpoint, whose weights the server at URL gets, one after the other.
"""

from __future__ import annotations

import sys

import requests
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

url, first, *others = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(first, dtype="auto")
answer = requests.get(f"{url}/get_world_size", timeout=60)
answer.raise_for_status()
engine = WeightTransferTrainerFactory.trainer_init(
    init_info=NCCLTrainerInitInfo(
        master_address="127.0.0.1",
        master_port=get_open_port(),
        world_size=answer.json()["world_size"] + 1,
        rank=0,
        packed=True,
    ),
    client=HTTPVLLMWeightSyncClient(url),
    source=ModuleSource(model),
)
for path in [first, *others]:
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict())
    requests.post(f"{url}/pause", timeout=60).raise_for_status()
    engine.send_weights()
    requests.post(f"{url}/resume", timeout=60).raise_for_status()
engine.shutdown()
