"""Parts for training engines of other distributions, which engines on torch.distributed and transformers share.

`TorchEngine` joins the ranks and counts steps; the rest works on whole parameters and on ``DTensor``s alike. The package
``weightlane-training-engine-template`` is an engine that is made of these parts.

>>> from weightlane.trainer import engine_toolkit as toolkit
>>> issubclass(toolkit.TorchEngine, toolkit.TrainingEngine)
True
"""

from .data.batch import LossDenominators, TokenBatch
from .data.sequences import IGNORED, MicroBatch
from .engines.contract import STATE_PARTS, BackwardResult, SequenceOutputs, StatePart, TrainingEngine
from .engines.fsdp2.shards import local_shards, trained_slices
from .engines.hf.checkpoint import CheckpointRun, checkpoint_runs, checkpoint_tensors, whole_model
from .engines.hf.export import ExportedModel, export_model
from .engines.hf.model_dir import check_model_dir, kept_types
from .engines.hf.stored_slices import TrainedSlice
from .engines.hf.training_state import resume, save_state
from .engines.optimizers.adamw import AdamW
from .engines.optimizers.settings import AdamParams
from .engines.rank_collectives import on_every_rank, on_rank_zero, require_open, share_json
from .engines.torch_engine import TOP, TorchEngine, outputs_by_sequence
from .objectives.loss import LOGPROBS, Loss, LossSums, ModelOutputs, OutputName, needed_outputs

__all__ = [
    "IGNORED",
    "LOGPROBS",
    "STATE_PARTS",
    "TOP",
    "AdamParams",
    "AdamW",
    "BackwardResult",
    "CheckpointRun",
    "ExportedModel",
    "Loss",
    "LossDenominators",
    "LossSums",
    "MicroBatch",
    "ModelOutputs",
    "OutputName",
    "SequenceOutputs",
    "StatePart",
    "TokenBatch",
    "TorchEngine",
    "TrainedSlice",
    "TrainingEngine",
    "check_model_dir",
    "checkpoint_runs",
    "checkpoint_tensors",
    "export_model",
    "kept_types",
    "local_shards",
    "needed_outputs",
    "on_every_rank",
    "on_rank_zero",
    "outputs_by_sequence",
    "require_open",
    "resume",
    "save_state",
    "share_json",
    "trained_slices",
    "whole_model",
]
