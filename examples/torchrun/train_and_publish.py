"""Trains a model with plain FSDP2 while stock vLLM servers serve the weights of every step; see docs/guides/your-own-loop.md.

torchrun --nproc-per-node 2 train_and_publish.py --model DIR --server http://127.0.0.1:8000 --engine shm --out trained
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from weightlane.rollout import ServerReplica
from weightlane.sync import CollectivePublisher, SyncConfig
from weightlane.trainer import shards_of

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="Hugging Face directory that the servers serve, too")
parser.add_argument("--server", action="append", required=True, help="address of a vLLM server; one or several")
parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks of each server")
parser.add_argument("--engine", default="shm", help="checkpoint engine that carries the weights")
parser.add_argument("--options", type=json.loads, default={}, help="options of that engine, as JSON")
parser.add_argument("--sync", type=json.loads, default={}, help="settings of weightlane.sync.SyncConfig, as JSON")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--out", help="where to save the trained model")
args = parser.parse_args()

device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
torch.get_device_module(device).set_device(device)  # FSDP, and the ranks' own process group, use the current one
dist.init_process_group()
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(dist.get_rank())

token = os.environ.get("VLLM_API_KEY", "")
servers = [ServerReplica(url, tensor_parallel=args.tensor_parallel, token=token) for url in args.server]
shards = shards_of(model, AutoConfig.from_pretrained(args.model).dtype)  # in the data type that the servers compute in
config = SyncConfig(**args.sync)
with CollectivePublisher(shards, servers, backend=args.engine, options=args.options, config=config) as weights:
    for step in range(1, args.steps + 1):
        tokens = torch.randint(model.config.vocab_size, (4, 32), device=device)  # your data
        model(input_ids=tokens, labels=tokens).loss.backward()
        weights.fence()  # the version before is copied: its tensors may change
        optimizer.step()
        optimizer.zero_grad()
        weights.publish(step)  # waits only while the version before is on its way; servers generate meanwhile
if args.out:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=state)
dist.barrier()  # a rank that ends at once may be aborted by torch: gloo's threads still let go of the last tensors
dist.destroy_process_group()
