"""Trains the arithmetic demo's model with TRL's GRPOTrainer, while a stock vLLM server serves the weights of every step.

python train_arithmetic.py --task runs/arithmetic/task-0 --server http://127.0.0.1:8000; see docs/guides/frameworks.md.
"""

import argparse

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from weightlane_trl import use_weightlane

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--task", required=True, help="directory that examples/arithmetic/prepare.py has written")
parser.add_argument("--server", required=True, help="address of the vLLM server")
parser.add_argument("--engine", default="shm", help="checkpoint engine that carries the weights")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()


def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1.0 for each completion that is the reference answer, 0.0 otherwise."""
    return [float(completion == reference) for completion, reference in zip(completions, answer, strict=True)]


with use_weightlane(engine=args.engine):
    trainer = GRPOTrainer(
        model=f"{args.task}/model",
        reward_funcs=exact_match,
        train_dataset=load_dataset("json", data_files=f"{args.task}/train.jsonl", split="train"),
        args=GRPOConfig(
            output_dir=f"{args.task}/trl",
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=args.server,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=6,
            max_steps=args.steps,
            learning_rate=3e-4,
            beta=0.0,
            bf16=False,  # the server of this example computes in float32, and so must the trainer
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=5,
        ),
    )
trainer.train()
report = trainer.vllm_generation.vllm_client.transfer.report
print(
    f"version {report.version} serves: {report.latency_s:.3f} s, of which the server paused {report.rollout_blocked_s:.3f} s"
)
