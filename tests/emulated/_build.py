"""Builds the emulated device's extension on first use and keeps it in a cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

NAME = "emulated_device"
SOURCES = Path(__file__).parent / "csrc"


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outcore-tests"


def build_key() -> str:
    """One build per source text, torch, Python and machine type."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    digest.update(f"{torch.__version__} {sys.version} {platform.machine()}".encode())
    return digest.hexdigest()[:20]


def load() -> ModuleType:
    """The extension module, built if this is the first use of these sources."""
    target = cache_root() / build_key()
    library = target / f"{NAME}.so"
    if not library.exists():
        cache_root().mkdir(parents=True, exist_ok=True)
        with (cache_root() / f"{target.name}.lock").open("w") as lock:
            # Parallel test workers meet here; the lock dies with its holder, so a killed build blocks nobody.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(target)
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Building with torch's builder also loads the result. A process of its own does it, so that this one loads
# the library exactly once, from its final place.
_BUILD = """
import sys
from torch.utils.cpp_extension import load
name, directory, *sources = sys.argv[1:]
flags = ["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"]
load(name, sources, extra_cflags=flags, build_directory=directory)
"""


def _build(target: Path) -> None:
    work = tempfile.mkdtemp(dir=cache_root(), prefix="build-")
    environment = dict(os.environ)
    environment.setdefault("MAX_JOBS", str(min(4, os.cpu_count() or 1)))
    # Ninja may live beside the interpreter without that directory being on the search path.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, NAME, work, *sources],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"building the emulated device failed:\n{done.stdout}\n{done.stderr}")
        target.mkdir(parents=True, exist_ok=True)
        os.replace(Path(work) / f"{NAME}.so", target / f"{NAME}.so")
    finally:
        shutil.rmtree(work, ignore_errors=True)
