"""Check a Hugging Face model directory before any process is started for it. Reads headers, not weights."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.tensor_spec import SAFETENSORS_DTYPES, kept_in_float32

from ..rank_collectives import on_every_rank, share_json

_PART = "model"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""Pattern of a model's name on Hugging Face's hub: owner and name."""
_FETCHED = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.tiktoken", "*.txt")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_HALF = {torch.bfloat16, torch.float16}
_SAME_MODELS = {"kimi_k2": "deepseek_v3"}
"""Values of ``model_type`` for models that transformers has by another name."""
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model that a run needs before it loads it."""

    path: Path
    config: Mapping[str, Any]
    """Contents of ``config.json``."""
    architecture: str
    """Class name, e.g. ``"Qwen3ForCausalLM"``."""
    vocab_size: int
    """Rows of the embedding that the configuration declares, padding included."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a completion, the tokenizer's own first."""
    dtype: str
    """Dtype of the weights, e.g. ``"bfloat16"``."""


def find_model(name: str | Path) -> Path:
    """Return the directory `name`, or that of the model `name` of Hugging Face's hub, downloaded unless it is in the local cache.

    Raises `ConfigError` if the model is neither in the local cache nor can be downloaded.
    """
    path = Path(name)
    if path.parent.is_dir() or not _HUB_NAME.fullmatch(str(name)):
        return path  # if it is no model, `check_model_dir` says why
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - optional, and slow to import
    from huggingface_hub.errors import (  # noqa: PLC0415 - as above
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_FETCHED)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as cause:
        reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise _error(
            f"there is no model directory {name}, and a model of this name can be had neither from the local cache nor from"
            f" Hugging Face's hub: {reason.rstrip('.')}.",
            f"Correct model.path. Without a network: `hf download {name}` where there is one, and point to the directory.",
        ) from cause


def is_model_dir(path: Path, head: str, device: torch.device) -> bool:
    """Whether `path` is a Hugging Face directory, which `check_model_dir` then checks on every rank. Collective.

    Raises `ConfigError`, on every rank, if only some ranks see the directory, or if it fails that check.
    """
    seen = share_json((path / "config.json").is_file(), device)
    if len(set(seen)) > 1:
        raise _error(f"rank {seen.index(False)} sees no model in {path}.", "Put it where every rank can read it.")
    if seen[0]:
        on_every_rank(lambda: check_model_dir(path, head), device, _PART)
    return bool(seen[0])


def check_model_dir(path: Path, head: str = "tokens") -> ModelInfo:
    """Check that `path` holds a causal language model with complete weights and a tokenizer that fits it.

    With `head` "value" it may also be a critic: one of transformers' models for token classification with one label.

    Raises `ConfigError` that says what is wrong: no such directory, ``config.json`` missing or malformed, an architecture that
    is not a causal language model, weights missing, truncated or broken, tokenizer missing or disagreeing with the model.
    """
    path = Path(path)
    if not path.is_dir():
        raise _error(f"there is no model directory {path}.", "Check the path, or make the model first.")
    raw = _read_json(path / "config.json")
    config, architecture = _language_model_config(path, raw, head)
    text_config = config.get_text_config()
    vocab_size = getattr(text_config, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise _error(f"{path / 'config.json'} has no usable vocab_size ({vocab_size!r}).", "Repair config.json.")
    if not has_weights(path):
        raise _error(
            f"{path} holds no weights: neither {_SINGLE} nor {_INDEX} is there.",
            "Only safetensors weights are read; convert others with transformers' save_pretrained.",
        )
    weight_headers(path)  # which checks them
    eos = _check_tokenizer(path, vocab_size, _model_eos(path, text_config))
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return ModelInfo(path, raw, architecture, vocab_size, eos, dtype)


def weight_elements(path: Path) -> int:
    """Count the elements of all weights in `path`, a directory that `check_model_dir` accepts."""
    return sum(math.prod(item["shape"]) for header in weight_headers(path).values() for item in header.values())


def has_weights(path: Path) -> bool:
    """Whether there are safetensors files of a model in `path`."""
    return any((path / name).is_file() for name in (_INDEX, _SINGLE))


def kept_types(path: Path, names: Iterable[str]) -> frozenset[str]:
    """Return the names of the checkpoint's tensors that stay float32, whatever dtype the others are sent or written in.

    Args:
        path: The model directory. If it holds no weights, all tensors count as stored in float32.
        names: Names of all tensors of the checkpoint.
    """
    return kept_in_float32(dict.fromkeys(names, torch.float32) | stored_types(path))


def stored_types(path: Path) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor of the checkpoint in `path`; empty if it holds no weights."""
    headers = weight_headers(path).values() if has_weights(path) else ()
    return {key: SAFETENSORS_DTYPES[item["dtype"]] for header in headers for key, item in header.items()}


def half_precision(dtypes: Iterable[torch.dtype | None]) -> torch.dtype:
    """Return the dtype in which to hold a parameter that never changes: the half precision of all its tensors, else float32.

    Args:
        dtypes: Dtypes in which the checkpoint has the parameter's tensors; None for one that it does not have.
    """
    found = set(dtypes)
    (only,) = found if len(found) == 1 else (None,)
    return only if only in _HALF else torch.float32


def weight_headers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the headers of all files with weights in `path`: tensors by file and name, as the format describes them.

    Raises `ConfigError` for a file that is missing or damaged, or a dtype that weightlane does not know.
    """
    index = path / _INDEX
    weight_map: Any = {}
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _error(f"{index} has no weight_map.")
    headers = {name: read_header(path, name) for name in sorted(set(map(str, weight_map.values()))) or [_SINGLE]}
    for tensor, name in weight_map.items():
        if tensor not in headers[str(name)]:
            raise _error(f"{index} places {tensor} in {name}, which does not hold it.")
    for name, header in headers.items():
        for tensor, item in header.items():
            if item["dtype"] not in SAFETENSORS_DTYPES:
                known = f"Known are {', '.join(SAFETENSORS_DTYPES)}."
                raise _error(f"{tensor} in {path / name} has the dtype {item['dtype']}, which is not known.", known)
    return headers


def _error(message: str, hint: str = "Fetch the model again.") -> ConfigError:
    return ConfigError(message, part=_PART, hint=hint)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise _error(f"{path.parent} has no {path.name}.", "Point to the folder that holds it.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as cause:  # not UTF-8, not JSON, numbers too long, brackets too deep
        raise _error(f"{path} is not valid JSON: {cause}.") from cause
    except OSError as cause:
        raise _error(f"{path} cannot be read: {cause.strerror}.", "Check its permissions.") from cause
    if not isinstance(data, dict):
        raise _error(f"{path} holds a {type(data).__name__}, not an object.")
    return data


def _language_model_config(path: Path, raw: Mapping[str, Any], head: str) -> tuple[Any, str]:
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - as above
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise _error(f"{path / 'config.json'} names no model_type.", "Is it the configuration of a transformers model?")
    if model_type in _SAME_MODELS:
        raise _error(
            f"{path} holds a {model_type}, a name that transformers does not know.",
            f"It is the same model as {_SAME_MODELS[model_type]}: set model_type to that in its config.json.",
        )
    expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    names = raw.get("architectures") or ([expected] if isinstance(expected, str) else [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _error(f"the architectures in {path / 'config.json'} are no list of names.", "Repair config.json.")
    accepted = {expected} if isinstance(expected, str) else set(expected or ())
    if head == "value" and model_type in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        accepted.add(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[model_type])
    if not names or names[0] not in accepted:
        raise _error(
            f"{path} holds a {names[0] if names else model_type}, which transformers does not know as a causal language"
            " model.",
            "Use a model of an architecture named ...ForCausalLM; code shipped inside a model directory is never run.",
        )
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True), names[0]
    except Exception as cause:  # config classes validate with exceptions of many kinds
        raise _error(f"transformers refuses {path / 'config.json'}: {cause}.", "Repair config.json.") from cause


def _model_eos(path: Path, text_config: Any) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    declared = [getattr(text_config, "eos_token_id", None)]
    if generation.is_file():
        declared.append(_read_json(generation).get("eos_token_id"))
    flat: list[int] = []
    for item in declared:
        flat.extend(item if isinstance(item, list | tuple) else [] if item is None else [item])
    if odd := [item for item in flat if not isinstance(item, int)]:
        raise _error(f"{path} has the eos_token_id {odd[0]!r}, which is no id.", "Repair its JSON files.")
    return tuple(dict.fromkeys(flat))


def read_header(folder: Path, name: str) -> dict[str, Any]:
    """Return dtype, shape and data_offsets of the tensors in one safetensors file, after checking that it is as long as it says.

    Raises `ConfigError` for a file that is missing or damaged.

    Layout: 8 bytes little-endian header length, the JSON header, then the data (https://huggingface.co/docs/safetensors).
    """
    path = folder / name
    try:
        is_there = Path(name).name == name and path.is_file()
    except OSError:  # a name that no file can have
        is_there = False
    if not is_there:
        raise _error(f"{folder} lacks the weights file {name} that its index names.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1  # noqa: PLR2004 - as in the layout above
            if not len("{}") <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise _error(f"{path} is not a safetensors file, or was cut off inside its header.")
            header = json.loads(file.read(length))
        tensors: dict[str, dict[str, Any]] = {
            key: {
                "dtype": str(item["dtype"]),
                "shape": tuple(map(int, item["shape"])),
                "data_offsets": tuple(map(int, item["data_offsets"])),
            }
            for key, item in header.items()
            if key != "__metadata__"
        }
        end = max((item["data_offsets"][1] for item in tensors.values()), default=0)
    except OSError as cause:
        raise _error(f"{path} cannot be read: {cause.strerror}.", "Check its permissions.") from cause
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as cause:
        if isinstance(cause, ConfigError):
            raise
        raise _error(f"{path} has a broken safetensors header: {cause}.") from cause
    if size != 8 + length + end:
        raise _error(
            f"{path} has {size} bytes where its header promises {8 + length + end}; it is truncated or damaged."
        )
    return tensors


def _check_tokenizer(path: Path, vocab_size: int, model_eos: tuple[int, ...]) -> tuple[int, ...]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - optional, and slow to import

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise _error(f"{path} has no tokenizer.", f"It needs one of {', '.join(_TOKENIZER_FILES)}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
    except Exception as cause:  # tokenizer backends raise exceptions of many kinds
        raise _error(f"the tokenizer in {path} cannot be loaded: {cause}.") from cause
    mismatch = "Model and tokenizer must come from the same release."
    if not vocabulary:
        raise _error(f"the tokenizer in {path} is empty.", mismatch)
    largest = max(vocabulary, key=vocabulary.__getitem__)
    if vocabulary[largest] >= vocab_size:
        raise _error(
            f"tokenizer and model disagree: token {largest!r} has id {vocabulary[largest]}, but the model's vocab_size is"
            f" {vocab_size}.",
            mismatch,
        )
    if tokenizer.eos_token_id is None and not model_eos:
        raise _error(f"neither the tokenizer nor the model in {path} names an end-of-sequence token.", mismatch)
    for eos in model_eos:
        if not 0 <= eos < vocab_size:
            raise _error(
                f"model and tokenizer disagree: the model ends on token {eos}, outside its vocab_size {vocab_size}.",
                mismatch,
            )
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    return tuple(dict.fromkeys((*own, *model_eos)))
