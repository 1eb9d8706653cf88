"""Configuration of the training side: engine, data and reward.

Every field carries the description that ``weightlane config`` prints beside its value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

OptimizerName = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
Head = Literal["tokens", "value"]
"""A model's last layer: see ``TrainerConfig.head``."""


class Section(BaseModel):
    """A section of a configuration: unknown keys are errors, and values stay as they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Fsdp2Config(Section):
    """How the fsdp2 engine splits a model over the ranks; ranks / (tensor x context) is data parallel.

    Parameters are sharded by FSDP2 over ranks / tensor_parallel.
    """

    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Neighbouring ranks that share every matrix of a layer, by transformers' plan for the architecture.",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks that share the tokens of every micro-batch, also of one sequence, which has this many times"
        " micro_batch_tokens; for architectures whose sequences are packed, without dropout.",
    )
    packing: Literal["auto", "off"] = Field(
        default="auto",
        description="Compute sequences one after the other in a row, without padding, where the architecture allows; off:"
        " pad all sequences of a micro-batch to the longest.",
    )
    shared_prefixes: bool = Field(
        default=True,
        description="Compute tokens that packed sequences of a micro-batch begin with once, such as the prompt of a group of"
        " completions. Passes with dropout don't.",
    )


class MegatronConfig(Section):
    """How the megatron engine splits a model over the ranks; ranks / (tensor x pipeline x context) is data parallel."""

    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks that share every matrix; divides the attention heads, key and value heads too.",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="Ranks that share the tokens of every sequence; a micro-batch has this many times micro_batch_tokens.",
    )
    pipeline_parallel: int = Field(
        default=1, ge=1, description="Stages the decoder layers are split into, a rank each."
    )
    virtual_pipeline: int = Field(
        default=1,
        ge=1,
        description="Runs of layers on each pipeline rank, worked on in turns; above 1 shortens the pipeline's idle time.",
    )
    expert_parallel: int = Field(
        default=1, ge=1, description="Ranks that share the experts of a mixture of experts, whole experts each."
    )
    grouped_gemm: bool = Field(
        default=False,
        description="Compute the experts of a layer by grouped matrix products instead of one after the other. Rows of their"
        " matrices must be multiples of 16 bytes.",
    )
    transformer_engine: bool = Field(
        default=False,
        description="Make decoder layers of TransformerEngine's linear layers, norms and attention, which must be installed;"
        " in bfloat16 on CUDA devices only.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split activations between the matrices along the sequence, over the ranks of tensor_parallel.",
    )
    distributed_optimizer: bool = Field(
        default=False,
        description="Split master weights and AdamW's moments over the data parallel ranks instead of repeating them; of"
        " adapters, the moments.",
    )
    overlap_grad_reduce: bool = Field(
        default=False,
        description="Sum gradients over the data parallel ranks while backward computes others, in every call of forward_backward"
        " instead of once in a step.",
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Gather parameters that other ranks have stepped while the next forward pass computes; needs"
        " distributed_optimizer and overlap_grad_reduce.",
    )
    shared_prefixes: bool = Field(
        default=True,
        description="Compute tokens that sequences of a micro-batch begin with once, such as the prompt of several completions."
        " Not with context_parallel, transformer_engine or linear attention.",
    )
    bucket_parameters: int = Field(
        default=40_000_000,
        ge=1,
        description="About the number of parameters in one sum or gather that overlaps; pipeline stages after the first have one"
        " for each chunk.",
    )

    @property
    def shares_prefixes(self) -> bool:
        """Whether shared prefixes are computed once, but for linear attention, which only the model says."""
        return self.shared_prefixes and self.context_parallel == 1 and not self.transformer_engine


class LoraConfig(Section):
    """A low-rank adapter (arXiv 2106.09685): y = W x becomes y = W x + alpha / rank * B (A x).

    It has no dropout, since rollouts have none: the policy that is trained would be another one than the policy that sampled.
    """

    rank: int = Field(default=16, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(default=32.0, gt=0, description="B (A x) is scaled by alpha / rank.")
    targets: tuple[str, ...] = Field(
        default=(),
        description="Linear layers by the last part of their Hugging Face names, such as q_proj or down_proj; none given: all"
        " those inside decoder layers.",
    )
    seed: int = Field(default=0, description="Seeds the initial values of A; B begins as 0.")
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="AdamW learning rate after the warm-up; none: trainer.learning_rate.",
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What a version of a run has. merged: the weights with the adapter added. adapter: A and B alone, which"
        " rollouts keep beside the weights of model.path; requests in flight end with the version that they began with.",
    )

    @property
    def scale(self) -> float:
        """The factor before B (A x)."""
        return self.alpha / self.rank


class TrainerConfig(Section):
    """How the policy is trained: engine, ranks, precision and optimizer."""

    engine: str = Field(
        default="fsdp2", description="Training engine, by entry-point name in group weightlane.training_engines."
    )
    ranks: int = Field(default=1, ge=1, description="Number of trainer ranks (processes) the model is sharded over.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device of the trainer ranks; auto takes CUDA where there is a device, else the CPU.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Dtype of forward and backward; master weights and gradients stay float32. auto: bfloat16 on a"
        " CUDA device, float32 on the CPU.",
    )
    head: Head = Field(
        default="tokens",
        description="tokens: the model's own head over its vocabulary. value: one number per position, as a critic has; this head"
        " starts as zeros, unless model.path has one (an architecture named ...ForTokenClassification with one label).",
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="adamw: torch's, fused. adamw_bf16, adamw_8bit: the same, with moments that are float32 only while a step is"
        " made, and else bfloat16, or torchao's 8 bits with a scale for every 256: 4 and 2 bytes for each parameter instead of 8."
        " An average that a step changes by less than its rounding (0.4 % in bfloat16) stays: betas[1] is best 0.99 or less."
        " muon: torch's Muon for the matrices of decoder layers (4 bytes), at AdamW's learning rates, and adamw for the rest,"
        " also for experts in one tensor."
        " Megatron has no muon; adapters have adamw.",
    )
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's decay rate of the average gradient.")
    learning_rate: float = Field(
        default=1e-6, gt=0, allow_inf_nan=False, description="The optimizer's learning rate after the warm-up."
    )
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly from 0."
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after the warm-up."
    )
    lr_decay_steps: int = Field(
        default=0, ge=0, description="Optimizer steps after the warm-up over which a linear or cosine schedule falls."
    )
    lr_final_share: float = Field(
        default=0.0, ge=0, le=1, description="Share of the learning rate at which such a schedule ends, and stays."
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates of the two moment averages."
    )
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this global L2 norm.")
    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description="Most tokens, padding included, in one forward pass of a rank; bounds activation memory.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute each decoder layer in backward: less activation memory for about a third more time.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered parameters between forward and backward; false trades memory for one gather less.",
    )
    fsdp2: Fsdp2Config = Field(default_factory=Fsdp2Config, description="How the fsdp2 engine splits the model.")
    megatron: MegatronConfig = Field(
        default_factory=MegatronConfig, description="How the megatron engine splits the model; other engines ignore it."
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Train a low-rank adapter instead of the model's own weights, which stay as they are; what is exported, and"
        " published unless lora.publish is adapter, are the weights with the adapter added. None: train the weights themselves.",
    )
    frozen: bool = Field(
        default=False,
        description="Only run the model forward, as a reference is run: no gradients, and no optimizer state. With lora, whose"
        " publish must be adapter then, its adapter isn't trained either: others are, and published in its place.",
    )
    router_replay: bool = Field(
        default=False,
        description="Route the tokens of a mixture of experts to the experts in the batch. A run fills it in from"
        " algorithm.router_replay.",
    )
    cpus_per_rank: float = Field(default=1.0, ge=0, description="CPUs Ray reserves for a trainer rank.")
    gpus_per_rank: float | None = Field(
        default=None,
        ge=0,
        description="GPUs Ray reserves for a trainer rank; none: 1 where there are any, unless device is cpu.",
    )
    threads_per_rank: int = Field(default=1, ge=1, description="torch intra-op threads of a trainer rank on the CPU.")
    offload_roles: bool = Field(
        default=False,
        description="Policy, critic and reference take turns on the ranks' device: what a call doesn't need is in the host's"
        " memory meanwhile.",
    )
    colocate: bool = Field(
        default=False,
        description="Policy and rollouts take turns on the same devices: rollouts sleep while a step is made, and the trainer's"
        " state is in the host's memory while they generate. Needs loop.max_staleness = 0, rollout.commit = in_place,"
        " sync.quorum = 1 and checkpoint_engine.backend shm or cuda_ipc.",
    )
    call_timeout_s: float = Field(
        1800.0, gt=0, description="Most seconds a call to the ranks (a step, saving) may take after those before it."
    )
    niceness: int = Field(
        0,
        ge=0,
        le=19,
        description="Added to the priority number of trainer ranks: above 0, rollouts on the same cores answer sooner.",
    )
    collective_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds until a collective between trainer ranks fails; must cover rank 0 writing a checkpoint.",
    )

    @model_validator(mode="after")
    def _betas_are_decay_rates(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError("betas must lie in [0, 1)")
        return self

    @model_validator(mode="after")
    def _lora_fits(self) -> Self:
        if self.lora is not None and self.frozen and self.lora.publish != "adapter":
            raise ValueError('frozen is true, and lora would train an adapter, unless lora.publish is "adapter"')
        if self.lora is not None and self.head == "value":
            raise ValueError("head is value, which lora would leave as it is: an adapter is beside decoder layers only")
        if self.lora is not None and self.optimizer != "adamw":
            raise ValueError(f"optimizer is {self.optimizer}, and lora trains an adapter, which is stepped by adamw")
        return self

    @model_validator(mode="after")
    def _a_schedule_has_a_length(self) -> Self:
        if self.lr_schedule != "constant" and not self.lr_decay_steps:
            raise ValueError(
                f"lr_schedule is {self.lr_schedule}, which needs lr_decay_steps, the steps over which it falls"
            )
        return self

    @property
    def trains_weights(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.lora is None and not self.frozen

    @property
    def publishes_adapter(self) -> bool:
        """Whether versions are the tensors of an adapter instead of weights."""
        return self.lora is not None and self.lora.publish == "adapter"


class TextDataConfig(Section):
    """The settings that files of tasks and files of examples share."""

    special_tokens: bool = Field(
        True, description="Whether prompts begin with the BOS token, if the tokenizer adds one to texts; chats don't."
    )
    changed: Literal["refuse", "accept"] = Field(
        "refuse", description="What becomes of a resumed run whose training data has other content than it began with."
    )


class DataConfig(TextDataConfig):
    """Task files: JSON Lines, one object per line."""

    train: Path = Field(description="JSONL file of training tasks.")
    heldout: Path | dict[Annotated[str, StringConstraints(pattern="^[A-Za-z0-9_-]+$")], Path] = Field(
        description="JSONL file of held-out tasks, which share no prompt with the training tasks; or a table of several such"
        " files, each measured under its own name."
    )
    prompt_key: str = Field(
        default="prompt", min_length=1, description="Key of the prompt in each line: a string, or with chat messages."
    )
    chat: bool = Field(
        default=False,
        description="Whether prompts are conversations: lists of messages with role and content, or a string as the user's"
        " only one. They go through the tokenizer's chat template; without, prompts are sent as they stand.",
    )
    answer_key: str = Field(default="answer", min_length=1, description="Key of the reference answer in each line.")
    group_size_key: str | None = Field(
        default=None,
        min_length=1,
        description="Key of a line's own number of completions, at least 2, in the place of algorithm.group_size, which holds for"
        " lines without it; none: no line has its own.",
    )
    curriculum: Literal["off", "success_rate"] = Field(
        default="off",
        description="success_rate: after each task was drawn once, those that are solved half the time are drawn ten times as"
        " often as those that are always or never solved: with the weight max(0.1, 4 p (1 - p)), where p is the success rate of a"
        " task's latest group. A completion succeeds if its reward is above 0. Rewards then say less about the data: the bias"
        " is printed at the end.",
    )

    @property
    def heldout_sets(self) -> dict[str, Path]:
        """The files of held-out tasks by name; a single one has the name ``""``."""
        return dict(self.heldout) if isinstance(self.heldout, dict) else {"": self.heldout}


class RewardConfig(Section):
    """The function that judges a completion."""

    function: str | None = Field(
        default=None,
        min_length=1,
        description="'module:function', called as function(completion: str, task: Mapping) -> float, or async; the module is"
        " looked for beside the configuration file, then in the working directory, then among installed packages. The completion"
        " is the text as the model wrote it, and has its token_ids and their logprobs. None: the environment judges.",
    )
    run_in: Literal["thread", "process"] = Field(
        default="thread",
        description="Where it is called. process: in processes of its own, for one that computes for long (threads share one"
        " interpreter with the loop) or may hang: a process is killed at the limit, a thread can only be left behind.",
    )
    workers: int = Field(default=16, ge=1, description="Most calls at once; of processes, how many there are.")
    time_limit_s: float = Field(
        default=60.0, gt=0, description="Most seconds of one call; a completion whose reward takes longer is left out."
    )


class EnvironmentConfig(Section):
    """The environment that the model takes turns with; without one, a completion of the prompt is all that is judged."""

    name: str | None = Field(
        default=None,
        min_length=1,
        description="Environment, by entry-point name in group weightlane.environments, or 'module:Class' of your own; the module"
        " is looked for beside the configuration file, then in the working directory, then among installed packages.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the environment, which its own type checks."
    )
    max_turns: int = Field(
        default=8, ge=1, description="Most replies of the model in an episode; it is judged as it stands then."
    )
    turn_time_limit_s: float = Field(
        default=300.0,
        gt=0,
        description="Most seconds until a reply of the model is complete, and until the environment asks for the next one or"
        " judges; an episode that takes longer is left out.",
    )
    episode_time_limit_s: float = Field(
        default=1800.0, gt=0, description="Most seconds of an episode; one that takes longer is left out."
    )
