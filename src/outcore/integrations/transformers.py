"""Models of Hugging Face transformers, built without memory for their parameters.

[Note: Parameters on meta, buffers real]
``torch.device("meta")`` would put buffers on meta too. Persistent ones are in the weight files, but others,
such as the inverse frequencies of rotary embeddings, exist only because the constructor computes them. So
each parameter is replaced by one on meta at the moment it is registered, and everything else in the
constructor runs as always: buffers come out as ``from_pretrained`` makes them. At most one parameter is in
memory at a time, and as long as nothing is written to it, the kernel gives it no pages.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outcore.errors import ModelError, UsageError
from outcore.integrations.presets import PRESETS

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The files of which a directory with weights has one."""


@dataclass
class Built:
    """A model that waits for `outcore.offload`.

    Attributes:
        name: as it was asked for.
        model: parameters on meta, buffers real and on the CPU.
        config: its transformers configuration.
        weights: the directory to load from, or ``None`` for a new model.
        tokenizer: the directory's own, or ``None``.
    """

    name: str
    model: Any
    config: Any
    weights: Path | None
    tokenizer: Any | None

    @property
    def parameters(self) -> int:
        """How many, those that are tied counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest sequence, or ``None`` where the model states none."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if found is None else int(found)


def build(name: str | os.PathLike[str], *, training: bool) -> Built:
    """A causal language model by the name of a preset or the path of a Hugging Face directory.

    Args:
        name: one of `outcore.integrations.presets.PRESETS`, or a directory with ``config.json``.
        training: whether it is to be trained; then it keeps no cache of keys and values.

    Raises:
        UsageError: there is no such preset or directory, or transformers is not installed.
        ModelError: the directory's configuration or tokenizer can't be used.
    """
    require()
    name = os.fspath(name)
    directory = Path(name).expanduser()
    if name in PRESETS and not (directory / "config.json").is_file():
        config, weights, tokenizer = preset(name), None, None
    elif directory.is_dir():
        config = config_of(directory)
        weights = directory if any((directory / file).is_file() for file in WEIGHTS) else None
        if weights is None:
            raise ModelError(f"{directory} has no {WEIGHTS[0]} nor an index of several: save it so")
        tokenizer = _tokenizer(directory)
    else:
        known = ", ".join(PRESETS)
        raise UsageError(f"unknown model {name!r}: name a directory with config.json and weights, or {known}")
    model = empty(config)
    model.config.use_cache = not training
    if weights is not None:
        _load_buffers(model, weights)
        _generation(model, weights)
    model.train(training)
    return Built(name, model, model.config, weights, tokenizer)


def from_config(settings: Mapping[str, Any], where: str) -> Any:
    """A causal language model on meta from a configuration as JSON has it.

    Args:
        where: the configuration is from, for messages.

    Raises:
        UsageError: transformers is not installed.
        ModelError: the configuration can't be used.
    """
    require()
    with tempfile.TemporaryDirectory(prefix="outcore-config-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(settings)), encoding="utf-8")
        try:
            model = empty(config_of(Path(folder)))
        except ModelError as error:
            raise ModelError(f"the configuration in {where} can't be used: {error}") from None
    model.config.use_cache = True
    return model


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Inside, parameters that modules register are on meta; see [Note: Parameters on meta, buffers real].

    It changes `torch.nn.Module` for all threads: build one model at a time.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def require() -> None:
    """Raises UsageError: transformers is not installed."""
    try:
        import transformers
    except ImportError:
        raise UsageError("this needs transformers: pip install 'outcore[transformers]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def preset(name: str) -> Any:
    """The configuration of a preset."""
    from transformers import GPT2Config

    return GPT2Config(**PRESETS[name].config())


def config_of(path: Path) -> Any:
    """The configuration in a directory's ``config.json``, or in a file.

    Raises:
        ModelError: it can't be used.
    """
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path} has no config.json: it is not the directory of a model")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the file makes it stumble over
        raise ModelError(f"{file} can't be used: {_first_line(error)}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path} holds quantised weights, which can't be trained: save it dequantised")
    return config


def _tokenizer(directory: Path) -> Any | None:
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((directory / file).is_file() for file in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"the tokenizer in {directory} can't be used: {_first_line(error)}") from None


def empty(config: Any) -> Any:
    """A causal language model without values: parameters on meta, buffers real.

    Raises:
        ModelError: the configuration makes none.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with meta_parameters(), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
    except Exception as error:
        raise ModelError(f"its config makes no causal language model: {_first_line(error)}") from None
    return model


def _load_buffers(model: nn.Module, directory: Path) -> None:
    """Buffers that are saved with a model have the values of the files."""
    missing = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    if not missing:
        return
    from safetensors import SafetensorError, safe_open

    buffers = dict(model.named_buffers())
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in missing & set(file.keys()):
                    buffers[name].copy_(file.get_tensor(name))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path} can't be read: {_first_line(error)}") from None


def _generation(model: Any, directory: Path) -> None:
    from transformers import GenerationConfig

    if not (directory / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        path = directory / "generation_config.json"
        raise ModelError(f"{path} can't be used: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
