"""Checks everything that a run needs before it starts a process or writes a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.contract.registry import rollout_engine_class
from weightlane.rollout.layout.loading.adapter_tensors import adapted_layers
from weightlane.rollout.layout.loading.refused_arguments import refuse_arguments
from weightlane.trainer.algorithms.composition import (
    check_models,
    check_roles,
    policy_objective,
    role_names,
    role_trainer,
)
from weightlane.trainer.algorithms.policy_gradient import reference_state
from weightlane.trainer.algorithms.ppo import critic_state
from weightlane.trainer.algorithms.roles import CRITIC, POLICY, REFERENCE
from weightlane.trainer.data.rewards import Judge, Reward, no_reward
from weightlane.trainer.data.tasks import HasContent, Task, TaskStream, load_splits
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.loop.environments.contract import Environment, EnvironmentContext
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.protocols import LoopState
from weightlane.trainer.objectives.named import Objective
from weightlane.trainer.objectives.named_advantages import NamedAdvantages
from weightlane.trainer.runner.run_dir import RunDir

from ..config.run_config import RunConfig, check_engine, load_config
from ..config.worker_config import WorkerConfig
from .ray_cluster import refuse_loopback
from .resources import Machines, refuse_unfitting


@dataclass(frozen=True, slots=True)
class Preparation:
    """The checked configuration of a run, and the models, data, functions and state that it names."""

    config: RunConfig
    run_dir: RunDir
    state: LoopState | None
    """The saved state that the run resumes from."""
    model: ModelInfo
    role_models: Mapping[str, Path]
    """Absolute model directory of each role that the algorithm needs."""
    tokenizer: HfTokenizer
    train_tasks: Sequence[Task]
    heldout_tasks: Mapping[str, Sequence[Task]]
    reward: Judge
    environment: Environment | None
    objective: Objective
    advantages: NamedAdvantages


def prepare(
    path: Path, overrides: Sequence[str], *, resume: bool = False, machines: Machines | None = None
) -> Preparation:
    """Check the configuration at the absolute `path`, its models, data and state. Raises a typed error for the first problem.

    With `machines` the run is for these, and what depends on the devices of this machine is not checked.
    """
    config = load_config(path, overrides, runs_here=machines is None)
    run_dir = RunDir(config.run.dir, resume=resume)
    run_dir.refuse_taken()
    check_roles(config.algorithm, config.trainer, config.critic, config.reference)
    training_engine_class(config.trainer.engine)
    here = machines is None and not config.ray.address  # with an address, its processes run on other machines
    if here:
        check_engine(config)
    model = check_model_dir(find_model(config.model.path))
    if config.rollout.adapter is not None:
        adapted_layers(model.path, config.rollout.adapter)
    rollout_engine = rollout_engine_class(config.rollout)  # refuses what the engine cannot do
    if config.rollout.routed_experts and here:
        rollout_engine.check(config.rollout, model.path)  # some builds of vLLM return no experts
    for rollout in config.rollout.by_size.values():
        refuse_arguments(rollout, model.path)
    models = role_models(config, model)
    check_models(models, config.trainer, config.critic, config.reference, here=here)
    refuse_loopback(config.ray, config.sync.host)
    refuse_unfitting(config, model, machines)
    tokenizer = HfTokenizer(model.path, begins=config.data.special_tokens and not config.data.chat)
    train_tasks, heldout_tasks = load_splits(config.data, tokenizer.as_chat)
    _refuse_long_prompts(config, tokenizer, train_tasks)
    _refuse_large_groups(config, train_tasks)
    own_modules = [path.parent, Path()]
    environment = make_environment(
        config.environment, EnvironmentContext(own_modules, model.path, config.algorithm.temperature)
    )
    reward = _reward(config, environment, own_modules)
    objective = Objective(policy_objective(config.algorithm), own_modules)
    advantages = NamedAdvantages(config.algorithm, own_modules)
    state = _saved_state(run_dir, config, train_tasks, models) if resume else None
    functions = reward, environment, objective, advantages
    return Preparation(config, run_dir, state, model, models, tokenizer, train_tasks, heldout_tasks, *functions)


def _reward(config: RunConfig, environment: Environment | None, search_path: Sequence[Path]) -> Judge:
    """Return the reward function. Raises `ConfigError` if it cannot be had, or there is none and the environment needs it."""
    if config.reward.function is not None:
        return Reward(config.reward.function, search_path, config.reward.time_limit_s)
    if environment is not None and environment.needs_reward:
        raise ConfigError(
            f"the environment {config.environment.name} judges by reward.function, which is missing.",
            part="reward",
            hint="Set it to 'module:function'.",
        )
    return no_reward


def _refuse_long_prompts(config: RunConfig, tokenizer: HfTokenizer, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` if every prompt is too long: a run leaves such prompts out, and would have none."""
    most = config.rollout.max_model_len - config.algorithm.max_new_tokens
    if not any(len(tokenizer.encode(task.prompt)) <= most for task in tasks):
        raise ConfigError(
            f"every prompt of {config.data.train} has more than {most} tokens, which are left for it.",
            part="data",
            hint="rollout.max_model_len is for prompt and completion, algorithm.max_new_tokens for the latter.",
        )


def _refuse_large_groups(config: RunConfig, tasks: Sequence[Task]) -> None:
    """Raise `ConfigError` if a task's group is larger than what a replica generates at once."""
    largest = max(tasks, key=lambda task: task.group_size)
    if largest.group_size > config.rollout.concurrency:
        raise ConfigError(
            f"{largest.place}: {config.data.group_size_key!r} is {largest.group_size}, and rollout.concurrency is"
            f" {config.rollout.concurrency}.",
            part="data",
            hint="A replica generates whole groups. Raise rollout.concurrency.",
        )


def saved_state(
    run_dir: RunDir, items: Sequence[HasContent], *, steps: int, setting: str, seed: int, may_change: bool
) -> LoopState:
    """Return the saved state from which a run over `items`, its tasks or examples, resumes.

    `setting` is the configuration key that raises `steps`, the optimizer steps of the whole run. `may_change` allows that the
    content of `items` differs from that with which the run was started. Raises `ConfigError` if the run is complete, or its data
    has changed.
    """
    step = run_dir.latest_step()
    assert step is not None, "RunDir checked it"
    state = LoopState.from_plain(run_dir.loop_state(step))
    if state.step >= steps and run_dir.has_model:
        raise ConfigError(
            f"the run in {run_dir.path} is complete: it has taken {state.step} of {steps} steps.",
            part="resume",
            hint=f"Raise {setting} to continue it.",
        )
    TaskStream(items, seed).restore(state.stream, may_change=may_change)
    return state


def _saved_state(
    run_dir: RunDir, config: RunConfig, train_tasks: Sequence[Task], role_models: Mapping[str, Path]
) -> LoopState:
    """`saved_state` for ``weightlane train``. Raises `ConfigError` if a role cannot load it, or a trained critic is missing."""
    state = saved_state(
        run_dir,
        train_tasks,
        steps=config.loop.steps,
        setting="loop.steps",
        seed=config.run.seed,
        may_change=config.data.changed == "accept",
    )
    policy = run_dir.trainer_state(state.step)
    states = {POLICY: policy, CRITIC: critic_state(policy)}
    if config.reference.refresh_every:
        states[REFERENCE] = reference_state(policy)
    for role, needed_by in ((CRITIC, "algorithm.objective = ppo"), (REFERENCE, "reference.refresh_every")):
        if role in role_names(config.algorithm) and role in states and not states[role].is_dir():
            raise ConfigError(
                f"the run in {run_dir.path} was saved without a {role}, which {needed_by} needs.",
                part="resume",
                hint="Resume it with the setting that it had, or begin a new run from its model.",
            )
    for role in (role for role in states if role in role_models):
        trainer = role_trainer(role, config.trainer, config.critic, config.reference)
        training_engine_class(trainer.engine).check(trainer, role_models[role], states[role])
    return state


def role_models(config: RunConfig | WorkerConfig, model: ModelInfo) -> dict[str, Path]:
    """The model directory of each role. Raises `ConfigError` if its vocabulary differs from the policy's."""
    paths = {POLICY: "", CRITIC: config.critic.path, REFERENCE: config.reference.path}
    found = {}
    for role in role_names(config.algorithm):
        info = model
        if paths[role]:
            info = check_model_dir(find_model(paths[role]), "value" if role == CRITIC else "tokens")
        if info.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the {role} has {info.vocab_size} tokens, and the policy {model.vocab_size}.",
                part="model",
                hint=f"Set {role}.path to a model with the policy's tokenizer, or leave it out.",
            )
        found[role] = info.path.resolve()
    return found
