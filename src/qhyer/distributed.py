"""Data parallel training: W processes, started by torchrun, train on the batch that one process would have drawn.

Every process draws the whole batch (index arithmetic) and keeps its share; means over the batch become means over all
processes, and so do gradients, before they are clipped. Then every process takes the same step.

torch's DistributedDataParallel is not used: it wraps the forward pass of one module, while a loss here is a function
of a batch that runs several networks, one of them twice, and keeps running statistics.

In one process all of this is the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from qhyer.errors import UserError, require

_place: tuple[int, int] | None = None  # rank and number of processes, once they have found each other
_parted = False  # whether they had, and have parted again


def active() -> bool:
    return _place is not None


def rank() -> int:
    return 0 if _place is None else _place[0]


def world() -> int:
    return 1 if _place is None else _place[1]


def is_main() -> bool:
    """Whether this process prints, writes and evaluates."""
    return rank() == 0


@contextlib.contextmanager
def processes(device: str) -> Iterator[str]:
    """Joins the processes that torchrun has started, if it has, and gives the device of this one."""
    global _place, _parted
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield device
        return
    if device.startswith("cuda"):
        local, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= found:
            raise UserError(f"torchrun has started more processes here than there are GPUs ({found}): --nproc-per-node")
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    # Long enough for an evaluation, during which the others wait; that a process has died, torchrun finds out.
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=12))
    _place = dist.get_rank(), dist.get_world_size()
    yield device
    _place = None  # not after an error: the others may be waiting in a sum, and torchrun ends them
    dist.destroy_process_group()
    _parted = True


def end(code: int) -> None:
    """Ends a process that was one of several, at once. Now and again torch's own threads are still joinable then, and
    an orderly exit of the interpreter aborts: torchrun would call a finished training failed, and end the others."""
    if _parted:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def mean(tensor: Tensor) -> Tensor:
    """Over the processes; no gradient passes."""
    if _place is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / _place[1]


def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This process's rows of a batch that all have drawn alike. Even shares: the mean of means is the mean."""
    if _place is None:
        return batch
    shares = {}
    for name, rows in batch.items():
        size, left = divmod(len(rows), world())
        require(
            left == 0,
            f"{len(rows)} rows of {name!r} cannot be shared evenly by {world()} processes: change the batch size",
        )
        shares[name] = rows[rank() * size : (rank() + 1) * size]
    return shares


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """One sum for all of them: many small ones would cost more in waiting than in sending."""
    if _place is None:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = mean(torch.cat([g.reshape(-1) for g in gradients]))
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def copy_from_main(tensors: Iterable[Tensor]) -> None:
    """Everybody gets the main process's values."""
    if _place is not None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def any_process(flag: bool) -> bool:
    """Whether it is so in any of them. On the CPU, so that no one waits for a device."""
    if _place is None:
        return flag
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags > 0)


def alike(text: str) -> bool:
    """Whether all of them say the same; none goes on before all have spoken."""
    if _place is None:
        return True
    said = float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
    most = torch.tensor([said, -said], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(most[0] == -most[1])
