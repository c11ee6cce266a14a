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

from outcore.checkpoint.dcp.read import from_dcp
from outcore.checkpoint.dcp.write import to_dcp
from outcore.checkpoint.export import export
from outcore.checkpoint.interrupts import Interrupts
from outcore.checkpoint.load import load
from outcore.checkpoint.reader import verify
from outcore.checkpoint.save import save
from outcore.checkpoint.saving import Saving
from outcore.checkpoint.series import Checkpoints
from outcore.engine import gather, offload, release, snapshot, weights
from outcore.memory.budget import Budget
from outcore.memory.ledger import Snapshot
from outcore.model.policies import Activations, Precision
from outcore.optim.foreign import Foreign
from outcore.optim.optimizer import Optimizer
from outcore.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion
from outcore.report.health import first_nonfinite
from outcore.report.tracer import record

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
    "Optimizer",
    "Precision",
    "Saving",
    "Snapshot",
    "export",
    "first_nonfinite",
    "from_dcp",
    "gather",
    "load",
    "offload",
    "record",
    "release",
    "save",
    "snapshot",
    "to_dcp",
    "verify",
    "weights",
]
