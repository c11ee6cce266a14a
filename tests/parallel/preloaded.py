"""What the nursery of ranks imports, see a note in `parallel.together`."""

import torch
import torch._dynamo  # optimizers import it when they are made
import torch.distributed.device_mesh

import outcore
from outcore.optim.kernels import accumulate, add_mean, workers
from parallel import loops

__all__ = ["loops"]


def warm() -> None:
    """Load the kernels that ranks use from where numba keeps them."""
    for dtype in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
        optimizer = outcore.AdamW([parameter])
        parameter.grad = torch.zeros(8, dtype=dtype)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        accumulate(torch.zeros(8), parameter.grad, workers=workers())
        add_mean(torch.zeros(8), parameter.grad.expand(2, 8), workers=workers())


torch.set_num_threads(1)
warm()
