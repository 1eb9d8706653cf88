"""``weightlane export`` writes a saved state of a run as a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from weightlane.ckpt_engines import ConfigError
from weightlane.sync import dtype_of
from weightlane.trainer.engines.hf.model_dir import check_model_dir, find_model
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.runner.run_dir import RunDir

from ..config.any_config import load_any_config
from ..config.tinker_config import TinkerConfig

_PART = "export"
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def export_state(run: Path, step: int | None, out: Path, dtype: str) -> int:
    """Write the model of a saved `step`, by default the newest, of the run in `run` to `out`. Returns the step."""
    if dtype not in _DTYPES:
        raise ConfigError(
            f"there is no dtype {dtype!r}.",
            part=_PART,
            hint=f"Set --dtype to {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}.",
        )
    config_file = run / "config.toml"
    if not config_file.is_file():
        raise ConfigError(f"{run} is not the directory of a run: it has no config.toml.", part=_PART)
    config = load_any_config(config_file, runs_here=False)
    if isinstance(config, TinkerConfig):
        files = "all weights as Hugging Face's" if config.service.trains_weights else "an adapter as PEFT's"
        raise ConfigError(
            f"{run} is the directory of a service, whose clients save checkpoints.",
            part=_PART,
            hint=f"Each sampler_weights and external_weights directory below {run / 'checkpoints'} has {files} files.",
        )
    run_dir = _with_states(run)
    saved = run_dir.saved_steps()
    chosen = run_dir.latest_step() if step is None else step
    if chosen not in saved:
        raise ConfigError(
            f"{run} has no saved state of step {chosen}.",
            part=_PART,
            hint=f"Saved steps: {', '.join(map(str, saved))}.",
        )
    if out.exists():
        raise ConfigError(f"{out} already exists.", part=_PART, hint="Choose another --out.")
    model = check_model_dir(find_model(config.model.path))
    engine = training_engine_class(config.trainer.engine)
    state = run_dir.trainer_state(chosen)
    engine.export_saved(state, model.path, out.resolve(), dtype_of(model.dtype if dtype == "auto" else dtype))
    return chosen


def _with_states(run: Path) -> RunDir:
    try:
        return RunDir(run, resume=True)
    except ConfigError as error:
        raise ConfigError(
            f"{run} has no saved state.",
            part=_PART,
            hint="A run saves its state every loop.save_every or sft.save_every steps, and when it ends.",
        ) from error
