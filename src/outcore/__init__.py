"""outcore: train and run PyTorch models whose states do not fit in accelerator memory.

::

    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = outcore.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1)
    outcore.offload(model, optimizer, budget=outcore.Budget(host="2GiB", disk="/nvme:400GiB"))

    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outcore.checkpoint.dcp.read import from_dcp
    from outcore.checkpoint.dcp.write import to_dcp
    from outcore.checkpoint.export import export
    from outcore.checkpoint.interrupts import Interrupts
    from outcore.checkpoint.load import load
    from outcore.checkpoint.reader import verify
    from outcore.checkpoint.save import save
    from outcore.checkpoint.saving import Saving
    from outcore.checkpoint.series import Checkpoints
    from outcore.memory.budget import Budget
    from outcore.memory.ledger import Snapshot
    from outcore.model.matmuls import widen_matmuls
    from outcore.model.policies import Activations, Precision
    from outcore.model.shares import Part, Shares
    from outcore.offloaded import change, gather, offload, release, shares, snapshot, weights
    from outcore.optim.foreign import Foreign
    from outcore.optim.optimizer import Optimizer
    from outcore.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion
    from outcore.parallel.sharding import Sharding
    from outcore.planning.machine import Machine
    from outcore.planning.plan import Plan
    from outcore.planning.planner import plan
    from outcore.report.health import first_nonfinite
    from outcore.report.tracer import record

# torch's allocator asks for huge pages: `outcore.memory.heap` says why.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Activations",
    "Adagrad",
    "Adam",
    "AdamW",
    "Budget",
    "Checkpoints",
    "Foreign",
    "Interrupts",
    "Lion",
    "Machine",
    "Optimizer",
    "Part",
    "Plan",
    "Precision",
    "Saving",
    "Sharding",
    "Shares",
    "Snapshot",
    "change",
    "export",
    "first_nonfinite",
    "from_dcp",
    "gather",
    "load",
    "offload",
    "plan",
    "record",
    "release",
    "save",
    "shares",
    "snapshot",
    "to_dcp",
    "verify",
    "weights",
    "widen_matmuls",
]

# Imported at first use: a script that only asks for help does not wait for compilers and formats.
_HOMES = {
    "SGD": "outcore.optim.optimizers",
    "Activations": "outcore.model.policies",
    "Adagrad": "outcore.optim.optimizers",
    "Adam": "outcore.optim.optimizers",
    "AdamW": "outcore.optim.optimizers",
    "Budget": "outcore.memory.budget",
    "Checkpoints": "outcore.checkpoint.series",
    "Foreign": "outcore.optim.foreign",
    "Interrupts": "outcore.checkpoint.interrupts",
    "Lion": "outcore.optim.optimizers",
    "Machine": "outcore.planning.machine",
    "Optimizer": "outcore.optim.optimizer",
    "Part": "outcore.model.shares",
    "Plan": "outcore.planning.plan",
    "Precision": "outcore.model.policies",
    "Saving": "outcore.checkpoint.saving",
    "Sharding": "outcore.parallel.sharding",
    "Shares": "outcore.model.shares",
    "Snapshot": "outcore.memory.ledger",
    "change": "outcore.offloaded",
    "export": "outcore.checkpoint.export",
    "first_nonfinite": "outcore.report.health",
    "from_dcp": "outcore.checkpoint.dcp.read",
    "gather": "outcore.offloaded",
    "load": "outcore.checkpoint.load",
    "offload": "outcore.offloaded",
    "plan": "outcore.planning.planner",
    "record": "outcore.report.tracer",
    "release": "outcore.offloaded",
    "save": "outcore.checkpoint.save",
    "shares": "outcore.offloaded",
    "snapshot": "outcore.offloaded",
    "to_dcp": "outcore.checkpoint.dcp.write",
    "verify": "outcore.checkpoint.reader",
    "weights": "outcore.offloaded",
    "widen_matmuls": "outcore.model.matmuls",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outcore' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
