"""``weightlane sft`` fine-tunes a model on examples: trainer ranks and a runner, without rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.plugins import RunHooks
from weightlane.plugins.prometheus import LOOPBACK
from weightlane.trainer.algorithms.composition import check_roles
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.data.sft_examples import Example, Examples, load_examples
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ray_ranks import RayRanks
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.lora.sites import DEFAULT
from weightlane.trainer.engines.registry import check_trainer, training_engine_class
from weightlane.trainer.loop.protocols import LoopState
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.runner.file_observers import FailuresFile, MetricsFile
from weightlane.trainer.runner.jobs import Export, Save, SaveAdapter
from weightlane.trainer.runner.run_dir import RunDir
from weightlane.trainer.runner.runner import Runner
from weightlane.trainer.runner.sft_loop import SftLoop, SftSummary

from ..config.sft_config import SftRunConfig, load_sft_config
from ..config.validation import explain
from ..output import console
from ..run.open_observers import RunObservers
from ..run.preparation import saved_state
from ..run.ray_cluster import RayCluster
from ..run.resources import Machines, fitted_trainer
from ..run.run_description import about_run
from ..run.sft_display import SftDisplay, print_sft_summary
from ..run.signals import cancel_on_sigterm, point_to_logs, start_ray


@dataclass(frozen=True, slots=True)
class SftPreparation:
    """The checked configuration of a run, and the model, data and state that it names."""

    config: SftRunConfig
    run_dir: RunDir
    state: LoopState | None
    """The saved state that the run resumes from."""
    model: ModelInfo
    train: Examples
    heldout: Examples


def prepare_sft(path: Path, overrides: Sequence[str], *, resume: bool = False) -> SftPreparation:
    """Check the configuration at the absolute `path`, its model, data and state. Raises a typed error for the first problem."""
    config = load_sft_config(path, overrides)
    run_dir = RunDir(config.run.dir, resume=resume)
    run_dir.refuse_taken()
    check_roles(AlgorithmConfig(), config.trainer)
    training_engine_class(config.trainer.engine)
    model = check_model_dir(find_model(config.model.path))
    here = not config.ray.address
    check_trainer(config.trainer, model.path, here=here)
    fitted_trainer(config.trainer, Machines.here(), counted=here)
    tokenizer, most = HfTokenizer(model.path, begins=config.data.special_tokens), _most_tokens(config, model)

    def examples(file: Path, setting: str) -> Examples:
        return load_examples(
            file,
            tokenizer,
            model.eos_token_ids,
            max_tokens=most,
            too_long=config.data.too_long,
            prompt_key=config.data.prompt_key,
            completion_key=config.data.completion_key,
            setting=setting,
        )

    train = examples(config.data.train, "data.train")
    heldout = examples(config.data.heldout, "data.heldout") if config.data.heldout else Examples([], 0)
    _check_apart(train.all, heldout.all)
    state = _saved_state(run_dir, config, train.all, model) if resume else None
    return SftPreparation(config, run_dir, state, model, train, heldout)


async def run_sft(path: Path, overrides: Sequence[str], *, resume: bool, live: bool) -> SftSummary:
    """Run the configuration at the absolute `path`. Raises a typed error for every problem of configuration or run."""
    cancel_on_sigterm()
    ready = prepare_sft(path, overrides, resume=resume)
    config, model, run_dir = ready.config, ready.model, ready.run_dir

    shown = console(soft_wrap=False)
    display = SftDisplay(shown, config.sft.all_steps(len(ready.train.all)), live=live)
    async with AsyncExitStack() as stack:
        stack.enter_context(run_dir.owned())
        run_dir.write_text("config.toml", explain(config))
        stack.enter_context(point_to_logs(run_dir.path / "logs", display.say))
        stack.callback(display.stop)
        own = [MetricsFile(run_dir.path / "metrics.jsonl"), FailuresFile(run_dir.path / "failures.jsonl"), display]
        observers = RunObservers(
            config.observers, run_dir.path.resolve(), own, display.say, config.model_dump(mode="json")
        )
        hooks = stack.enter_context(observers)
        cpus = config.trainer.ranks * config.trainer.cpus_per_rank
        cluster = RayCluster(config.ray, cpus, run_dir.path / "logs", observers.environment)
        await start_ray(stack, cluster)
        config = config.model_copy(update={"trainer": fitted_trainer(config.trainer, cluster.machines())})
        run_dir.write_text("config.toml", explain(config))
        ready = replace(ready, config=config)
        if skipped := ready.train.skipped + ready.heldout.skipped:
            display.say(f"{skipped} examples are longer than data.max_tokens and left out")
        runner = await _start(ready, hooks, display, stack)
        loop = _loop(ready, hooks, runner)
        summary = await loop.run()
        summary.skipped_examples = ready.train.skipped + ready.heldout.skipped
        cluster.succeeded()
    run_dir.write_json("summary.json", {"run": about_run(config, model, path), **summary.to_plain()})
    print_sft_summary(shown, summary, str(run_dir.path))
    return summary


async def _start(ready: SftPreparation, hooks: RunHooks, display: SftDisplay, stack: AsyncExitStack) -> Runner:
    """Start the trainer ranks."""
    config, trainer, state = ready.config, ready.config.trainer, ready.state
    display.say(
        f"starting {trainer.ranks} trainer rank(s) ({trainer.engine}) for {len(ready.train.all)} examples"
        + (f", resuming at step {state.step}" if state else "")
    )
    role = RoleSpec(
        POLICY,
        trainer,
        ready.model.path.resolve(),
        seed=config.run.seed,
        state=ready.run_dir.trainer_state(state.step) if state else None,
    )
    dispatch = WorkerDispatch([role], {role.group: RayRanks(trainer, None if config.ray.address else LOOPBACK)})
    stack.push_async_callback(dispatch.close)
    await dispatch.start()
    runner = Runner(dispatch, hooks=hooks)
    stack.push_async_callback(runner.close)
    return runner


def _loop(ready: SftPreparation, hooks: RunHooks, runner: Runner) -> SftLoop:
    config, run_dir = ready.config, ready.run_dir
    name = "model" if config.trainer.lora is None else "adapter"

    async def save(loop_state: LoopState) -> None:
        await runner.run(Save(run_dir.begin_state(loop_state.step)))
        run_dir.finish_state(loop_state.step, loop_state.to_plain())

    async def export(step: int, *, last: bool) -> None:
        place = run_dir.begin_export(step, last=last, name=name)
        if config.trainer.lora is None:
            await runner.run(Export(place, ready.model.dtype))
        else:
            await runner.run(SaveAdapter(DEFAULT, place, optimizer=False))
        run_dir.finish_export(last=last, name=name)

    return SftLoop(
        runner,
        config.sft,
        ready.train.all,
        ready.heldout.all,
        seed=config.run.seed,
        hooks=hooks,
        save=save,
        export=export,
        resume=ready.state,
    )


def _most_tokens(config: SftRunConfig, model: ModelInfo) -> int:
    """Return the most tokens of an example. Raises `ConfigError` if neither the configuration nor the model has a limit."""
    text = model.config.get("text_config", model.config)
    found = config.data.max_tokens or text.get("max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError(
            "the model's config.json has no max_position_embeddings.", part="data", hint="Set data.max_tokens."
        )
    return found


def _check_apart(train: Sequence[Example], heldout: Sequence[Example]) -> None:
    """Raise `ConfigError` if a held-out example is trained on."""
    trained = {_tokens(example): example.place for example in train}
    for example in heldout:
        if place := trained.get(_tokens(example)):
            raise ConfigError(
                f"{example.place}: the same example is in {place}.",
                part="data",
                hint="Remove it from one of the files: its log-probability after the training would prove nothing.",
            )


def _tokens(example: Example) -> tuple[bytes, bytes]:
    return example.sequence.tokens.numpy().tobytes(), example.sequence.targets.numpy().tobytes()


def _saved_state(run_dir: RunDir, config: SftRunConfig, train: Sequence[Example], model: ModelInfo) -> LoopState:
    state = saved_state(
        run_dir,
        train,
        steps=config.sft.all_steps(len(train)),
        setting="sft.epochs" if config.sft.steps is None else "sft.steps",
        seed=config.run.seed,
        may_change=config.data.changed == "accept",
    )
    engine_class = training_engine_class(config.trainer.engine)
    engine_class.check(config.trainer, model.path, run_dir.trainer_state(state.step))
    return state
