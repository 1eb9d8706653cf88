"""Configuration of the algorithm: objective, batches and sampling, critic, and reference."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ..config import Section

KlEstimator = Literal["k1", "k2", "k3"]
"""Estimators of a KL divergence from samples; see `weightlane.trainer.objectives.reference_kl`."""


class AlgorithmConfig(Section):
    """The policy-gradient objective and how completions are sampled for it."""

    objective: str = Field(
        default="dual_clip",
        min_length=1,
        description="The loss: dual_clip, grpo, ppo, gspo, cispo, or 'module:function' for one of your own; the module is looked"
        " for beside the configuration file, then in the working directory, then among installed packages.",
    )
    group_size: int = Field(
        default=8, ge=2, description="Completions sampled per prompt; their rewards are compared to each other."
    )
    prompts_per_step: int = Field(
        default=32, ge=1, description="Prompts (groups) in one batch, of which a version of the weights is made."
    )
    mini_batch_prompts: int | None = Field(
        default=None,
        ge=1,
        description="Prompts in one optimizer step, a divisor of prompts_per_step; none: all of a batch.",
    )
    epochs: int = Field(
        default=1,
        ge=1,
        description="Times that each batch is trained on: a batch takes epochs * prompts_per_step / mini_batch_prompts optimizer"
        " steps. Advantages, and log-probabilities of reference and trainer, are those before the first.",
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The clipped ratio is at least 1 - clip_low.")
    clip_high: float = Field(
        default=0.28, gt=0, description="The clipped ratio is at most 1 + clip_high (DAPO's clip-higher)."
    )
    ratio_cap: float = Field(
        default=2.0,
        gt=1,
        description="The second clip of a dual-clip surrogate: the ratio counts as at most this where the first clip does not"
        " bound it, on tokens with negative advantage that the rollout found unlikely; their gradient is 0 beyond it."
        " At least 1 + clip_high.",
    )
    proximal: Literal["rollout", "trainer"] = Field(
        default="rollout",
        description="The policy that the clips of grpo, ppo and gspo are around: the one that sampled a token, or the trainer's"
        " before the first step on a batch, with a truncated importance weight between the two.",
    )
    importance_cap: float = Field(default=2.0, gt=0, description="That weight is at most this. It has no gradient.")
    importance_level: Literal["token", "sequence"] = Field(
        default="token", description="Whether each token has such a weight, or each completion the product of them."
    )
    mismatch_mask: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="What the loss leaves out where trainer and rollout disagree: token: targets whose ratio of probabilities,"
        " the trainer's before the first step on a batch to the rollout's, is not between mismatch_low and mismatch_high."
        " sequence: completions whose geometric mean of it isn't. They still count in the mean.",
    )
    mismatch_low: float = Field(default=0.5, ge=0, lt=1, description="Least ratio that is not left out.")
    mismatch_high: float = Field(default=5.0, gt=1, description="Largest ratio that is not left out.")
    router_replay: bool = Field(
        default=False,
        description="In a mixture of experts, compute the policy with the experts that the rollout chose for each token, weighted"
        " by the trainer's own router (Rollout Routing Replay, R3, arXiv 2510.11370). Needs a rollout.engine that returns them:"
        " vllm, on GPUs, or transformers.",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence from a reference policy in the loss, whichever it is, but for ppo, which has it"
        " as a penalty in the rewards; 0 for none.",
    )
    kl_estimator: KlEstimator = Field(
        default="k2",
        description="How that divergence is estimated from samples. On average, the gradient of k2 is that of the reverse KL,"
        " KL(policy || reference); k3, GRPO's, has that of the forward KL; k1 has none, and only adds noise. ppo's penalty is k1,"
        " whose gradient in rewards is the right one.",
    )
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="Weight of an entropy bonus in the loss, whichever it is; 0 for none."
    )
    value_clip: float | None = Field(
        default=None,
        gt=0,
        description="In a critic's loss (weightlane.trainer.value_loss), how far a value can move from the one before the first"
        " step on a batch and still lower its error; not set for no such clip. Changes nothing where a batch takes one step.",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="ppo: discount of rewards, by token.")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="ppo: lambda of generalised advantage estimation; 0 trusts the critic, 1 the rewards.",
    )
    normalize_std: bool = Field(
        default=True,
        description="Divide a group's centred rewards by their standard deviation; false is Dr. GRPO's variant.",
    )
    advantages: str = Field(
        default="group",
        min_length=1,
        description="How much better than expected a completion was. group: than its group, divided by the group's standard"
        " deviation (GRPO; Dr. GRPO without normalize_std). rloo: than the group's other completions. reinforce_pp: than the"
        " batch, divided by its standard deviation. reinforce_pp_baseline: than its group, divided by the standard deviation in"
        " the batch. Or 'module:function', looked for as that of objective. Not for ppo, whose advantages come from the critic.",
    )
    refill: int = Field(
        default=0,
        ge=0,
        description="Most further tasks that are drawn for one place in a batch while its group has no signal, that is equal"
        " rewards, hence advantages of 0; the last one is trained on as it is. Tasks that are always or never solved are then"
        " trained on less often than they are drawn: the bias is printed at the end. 0: every group is trained on.",
    )
    overlong: Literal["keep", "drop", "mask", "penalty"] = Field(
        default="keep",
        description="What becomes of a completion that was cut off at max_new_tokens. keep: it counts like any other. drop: it is"
        " left out, of its group's mean, too. mask: it counts in the group's mean, and is not trained on. penalty: the reward of"
        " every completion falls linearly over the last overlong_buffer tokens, by overlong_penalty in all (DAPO, arXiv"
        " 2503.14476, equation 13).",
    )
    overlong_buffer: int = Field(
        default=0, ge=0, description="With overlong = penalty: the tokens below max_new_tokens over which rewards fall."
    )
    overlong_penalty: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="With overlong = penalty: by how much the reward of a completion of max_new_tokens is lower.",
    )
    temperature: float = Field(
        default=1.0, ge=0.01, le=2, description="Sampling temperature; the trainer scales its logits the same way."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Longest completion, in tokens.")
    compute_zero_advantage: bool = Field(
        default=False,
        description="Run completions through the model whose advantage is 0, as in a group with equal rewards: their gradient is"
        " 0, and only metrics such as the entropy change. They count in the mean over tokens either way, and are always run where"
        " a KL term or an entropy bonus gives them a gradient.",
    )

    @property
    def leaves_out_zero_advantages(self) -> bool:
        """Whether completions with advantage 0 have no gradient and need not be computed."""
        has_gradient = self.kl_coefficient or self.entropy_coefficient or self.objective == "ppo"
        return not (self.compute_zero_advantage or has_gradient)

    @property
    def needs_reference(self) -> bool:
        """Whether a batch needs the log-probabilities of a reference policy."""
        return self.kl_coefficient > 0

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps on each batch."""
        return self.epochs * self.prompts_per_step // (self.mini_batch_prompts or self.prompts_per_step)

    @model_validator(mode="after")
    def _mini_batches_fill_a_batch(self) -> Self:
        if self.mini_batch_prompts is not None and self.prompts_per_step % self.mini_batch_prompts:
            raise ValueError(
                f"mini_batch_prompts ({self.mini_batch_prompts}) must divide prompts_per_step ({self.prompts_per_step})"
            )
        return self

    @model_validator(mode="after")
    def _advantages_are_the_groups(self) -> Self:
        if self.objective == "ppo" and self.advantages != "group":
            raise ValueError(f"advantages is {self.advantages}, and those of objective = ppo come from its critic")
        if self.advantages != "group" and not self.normalize_std:
            raise ValueError(f"normalize_std is false, which is a setting of advantages = group, not {self.advantages}")
        return self

    @model_validator(mode="after")
    def _refilled_groups_have_no_signal(self) -> Self:
        if self.refill and self.objective == "ppo":
            raise ValueError(
                f"refill is {self.refill}, and objective is ppo: by its critic, equal rewards have advantages that are not 0"
            )
        if self.refill and self.advantages == "reinforce_pp":
            raise ValueError(
                f"refill is {self.refill}, and advantages is reinforce_pp: relative to the batch, equal rewards of a group have"
                " advantages that are not 0"
            )
        return self

    @model_validator(mode="after")
    def _the_buffer_is_of_the_penalty(self) -> Self:
        if self.overlong == "penalty" and not 0 < self.overlong_buffer <= self.max_new_tokens:
            raise ValueError(
                f"overlong is penalty, which needs an overlong_buffer of 1 to max_new_tokens ({self.max_new_tokens}) tokens, not"
                f" {self.overlong_buffer}"
            )
        if self.overlong != "penalty" and self.overlong_buffer:
            raise ValueError(f"overlong_buffer is {self.overlong_buffer}, and overlong is {self.overlong}, not penalty")
        return self

    @model_validator(mode="after")
    def _cap_lies_above_the_clip(self) -> Self:
        if self.ratio_cap < 1.0 + self.clip_high:
            raise ValueError(f"ratio_cap ({self.ratio_cap}) must be at least 1 + clip_high ({1.0 + self.clip_high})")
        return self


class CriticConfig(Section):
    """The critic that ppo trains beside the policy, with the same engine settings."""

    path: str = Field(
        default="",
        description="Hugging Face directory, or name on the hub, that the critic begins with: a critic or a policy with the"
        " policy's tokenizer; empty: model.path. A policy gets a head of zeros.",
    )
    learning_rate: float = Field(1e-5, gt=0, allow_inf_nan=False, description="AdamW's, on the trainer's schedule.")
    ranks: int = Field(
        default=0,
        ge=0,
        description="Ranks of its own, which compute at the same time as the policy's; 0: it is on the policy's ranks, in turns"
        " with the policy.",
    )


class ReferenceConfig(Section):
    """The policy from which the trained one shall not go far, where algorithm.kl_coefficient is above 0."""

    path: str = Field(
        default="",
        description="Hugging Face directory of it, or its name on the hub, with the policy's tokenizer; empty: model.path.",
    )
    refresh_every: int = Field(
        default=0,
        ge=0,
        description="Batches after which the policy, as it is then, becomes the reference, again and again; 0: the reference"
        " stays as it is.",
    )
    ranks: int = Field(default=0, ge=0, description="Ranks of its own, as critic.ranks.")
