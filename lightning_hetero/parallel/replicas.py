"""Replicas of one model, one per rank, on any tiers: equal weights, averaged gradients.

[Note: One order]
Every rank goes through the parameters in the order of the module, so all ranks do the same
collectives without further communication. Only the set of parameters with gradients is exchanged
first. A mean is computed once and is the same on all ranks bit for bit. Ranks divide before they
add, as ``DistributedDataParallel`` does.

[Note: Parameters without gradients]
As with ``find_unused_parameters=True``: a rank whose batch has not used a parameter adds zeros to
the others' gradients; a parameter that no rank has used has no gradient afterwards, and no update.

[Note: Buckets]
Small gradients are reduced together, through copies in flat tensors; ``_IN_FLIGHT`` of these exist
at a time. A gradient larger than a bucket is reduced in place, and copied only if the backend
cannot take it. :func:`bucket_memory_bytes` computes the memory for that beside the gradients,
before there are any.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.errors import ConfigError
from lightning_hetero.runtime.device.gradients import check_dense
from lightning_hetero.units import MIB

BUCKET_BYTES = 25 * MIB  # DDP's default
_IN_FLIGHT = 2  # buckets: more do not hide more time, and take memory


def check_same(module: nn.Module) -> None:
    """Refuses ranks with different models.

    Raises:
        ConfigError: Names, shapes or dtypes of parameters differ, or the trained ones; raised on
            every rank.
    """
    rows = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in module.named_parameters()]
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, (len(rows), hashlib.sha256("\n".join(rows).encode()).hexdigest()))
    if len(set(digests)) > 1:
        raise ConfigError(
            f"the ranks' models differ: {[count for count, _ in digests]} parameters, or others by name, shape or dtype, or they "
            f"train others. Build the same model on every rank."
        )


@contextmanager
def all_or_none() -> Iterator[None]:
    """If the context fails on one rank it fails on all, instead of waiting in a collective.

    Raises:
        ConfigError: It has failed on another rank; names the rank and the reason. A failing rank
            raises its own error.
    """
    errors: list[Any] = [None] * dist.get_world_size()
    try:
        yield
    except Exception as error:
        dist.all_gather_object(errors, f"{type(error).__name__}: {error}")
        raise
    dist.all_gather_object(errors, None)
    failed = {rank: text for rank, text in enumerate(errors) if text is not None}
    if failed:
        rank, text = next(iter(failed.items()))
        raise ConfigError(f"rank {rank} of {len(errors)} cannot begin, nor can the others without it. {text}")


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Gives all ranks the first rank's values, one tensor at a time.

    Args:
        tensors: The same tensors on all ranks, in one order; they may be offloaded.
        device: The device of tensors for the process group's backend.
    """
    for tensor in tensors:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if dist.get_rank() == 0:
            value.copy_(tensor.detach())
        dist.broadcast(value, src=0)
        if dist.get_rank() != 0:
            tensor.copy_(value)


def bucket_memory_bytes(parameters: Iterable[nn.Parameter], device: torch.device, *, bucket_bytes: int = BUCKET_BYTES) -> int:
    """The most memory that :func:`average_gradients` takes on ``device`` beside gradients, bytes.

    See [Note: Buckets].
    """
    trained = [p for p in parameters if p.requires_grad]
    small = sum(p.nbytes for p in trained if p.nbytes <= bucket_bytes)
    large = [p for p in trained if p.nbytes > bucket_bytes]
    copies = [p.nbytes for p in large if device.type != "cpu" or not p.is_contiguous()]  # gradients have their parameters' layout
    for _ in range(_IN_FLIGHT):
        copies.append(min(small, bucket_bytes))
        small -= copies[-1]
    return sum(sorted(copies)[-_IN_FLIGHT:])


@torch.no_grad()
def average_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]], device: torch.device, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sets gradients to their mean over all ranks.

    See [Note: One order] and [Note: Parameters without gradients].

    Args:
        parameters: The model's parameters with their names, in one order on all ranks. Their
            gradients may be in host memory.
        device: The device of tensors for the process group's backend.
        bucket_bytes: Bytes of gradients that are reduced together; the same on all ranks.

    Raises:
        UnsupportedError: A gradient is not dense; names the parameter.
    """
    trained = []
    for name, parameter in parameters:
        if parameter.grad is not None:
            check_dense(name, parameter.grad)
        if parameter.requires_grad:
            trained.append(parameter)
    present = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    used = [p for p, somewhere in zip(trained, present.tolist(), strict=True) if somewhere]
    pending: deque[tuple[_Bucket, Any]] = deque()
    for parameters_of_bucket in _buckets(used, bucket_bytes):
        if len(pending) == _IN_FLIGHT:
            _finish(*pending.popleft())
        pending.append(_begin(_Bucket.of(parameters_of_bucket, device)))
    while pending:
        _finish(*pending.popleft())


def _begin(bucket: _Bucket) -> tuple[_Bucket, Any]:
    bucket.flat.div_(dist.get_world_size())
    return bucket, dist.all_reduce(bucket.flat, async_op=True)


def _finish(bucket: _Bucket, work: Any) -> None:
    work.wait()
    bucket.scatter()


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype, together as large as a bucket may be."""
    some: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if some and (parameter.dtype != some[0].dtype or size + parameter.nbytes > bucket_bytes):
            yield some
            some, size = [], 0
        some.append(parameter)
        size += parameter.nbytes
    if some:
        yield some


def _lies_well(gradient: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a collective may run on the gradient itself."""
    return type(gradient) is Tensor and gradient.dtype == dtype and gradient.is_contiguous() and gradient.device == device


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gradients in one flat tensor: a copy, or a single contiguous gradient itself."""

    parameters: list[nn.Parameter]
    flat: Tensor
    is_copy: bool

    @classmethod
    def of(cls, parameters: list[nn.Parameter], device: torch.device) -> _Bucket:
        if len(parameters) == 1:
            (parameter,) = parameters
            if parameter.grad is None and parameter.is_contiguous() and parameter.device == device:
                parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            if parameter.grad is not None and _lies_well(parameter.grad, parameter.dtype, device):
                return cls(parameters, parameter.grad.detach().view(-1), is_copy=False)
        flat = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=device)
        bucket = cls(parameters, flat, is_copy=True)
        for parameter, piece in bucket._pieces():
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.detach())
        return bucket

    def _pieces(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        pieces = torch.split(self.flat, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            yield parameter, piece.view(parameter.shape)

    def scatter(self) -> None:
        """Copies the values back into the gradients."""
        for parameter, piece in self._pieces() if self.is_copy else ():
            if parameter.grad is None:
                parameter.grad = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                )
            parameter.grad.copy_(piece)
