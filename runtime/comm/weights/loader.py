"""A delta's way into an engine of another maker: SGLang's processes call `take` (its `--custom-weight-loader`).

SGLang fuses tensors, cuts them over its ranks and holds them under other names; where an item belongs is known to the
model's own `load_weights` alone. It is given tensors of which only the items that changed are known (`Changed`): the
parts and views that it makes of them are such tensors too, and when one is copied into a parameter, the other items
stay. So nothing is kept beside the parameters, and what is written are the very bytes that were sent. A model that
computes with what it loads, in place of moving it, is found out, and everything is pushed instead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import _resolve_process_group

from runtime.comm.buckets import TAKEN, TakeDelta, buckets, tensor_bytes
from runtime.comm.weights import delta, folder
from runtime.comm.weights.tensors import typed
from runtime.types import Manifest

logger = logging.getLogger(__name__)

_MOVES: Final = frozenset(
    (
        *("alias", "cat", "clone", "constant_pad_nd", "detach", "expand", "permute", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "stack", "t", "_to_copy", "transpose", "unbind", "unsqueeze", "_unsafe_view"),
        "view",
    )
)
"""Operators that move items and compute nothing."""


class Changed(Tensor):
    """A tensor of which some items are known.

    Args:
        items: all of them; what stands in place of the unknown ones is no matter.
        known: bool, of the same shape.
    """

    _items: Tensor
    _known: Tensor

    @staticmethod
    def __new__(cls: type[Changed], items: Tensor, known: Tensor) -> Changed:
        how = {"strides": items.stride(), "dtype": items.dtype, "device": items.device}
        return Tensor._make_wrapper_subclass(cls, items.shape, **how)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, items: Tensor, known: Tensor) -> None:
        self._items, self._known = items, known

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "copy_" and not isinstance(args[0], Changed):
            into, new = args[0], args[1]
            items, known = (part.to(into.device) for part in (new._items, new._known))
            return into.copy_(torch.where(known, items.to(into.dtype), into))
        if name not in _MOVES or (name == "view" and func._overloadname == "dtype"):
            if (made := func.decompose(*args, **kwargs)) is NotImplemented:  # else it is made of others
                raise NotImplementedError(f"the model computes {name} of what it loads, which no delta can go through")
            return made
        items = func(*_each(args, lambda t: t._items if isinstance(t, Changed) else t), **kwargs)
        known = func(*_each(args, lambda t: t._known if isinstance(t, Changed) else torch.ones_like(t)), **kwargs)
        if isinstance(items, Tensor):
            return Changed(items, known.bool())
        return type(items)(Changed(i, k.bool()) for i, k in zip(items, known, strict=True))


def _each(args: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    """Arguments of an operator, tensors among them replaced."""
    if isinstance(args, tuple | list):
        return type(args)(_each(arg, pick) for arg in args)
    return pick(args) if isinstance(args, Tensor) else args


def take(model: nn.Module, named: Sequence[tuple[str, Tensor]]) -> None:
    """All of one push, in each of an engine's processes at the same time. The first of them writes the answer.

    Args:
        named: one pair, whose name is a TakeDelta as JSON; a tensor is there because SGLang wants one.
    """
    order = msgspec.json.decode(named[0][0], type=TakeDelta)
    device, problem = next(model.parameters()).device, ""
    try:
        for payload, place in zip(_payloads(order, device), buckets(order.manifest), strict=True):
            if not problem:  # else the rest is received all the same: the others would wait for us
                problem = load(model, payload, order.manifest, place)
    except (RuntimeError, ValueError, OSError, delta.Damaged) as e:
        problem = f"{type(e).__name__}: {e}"
    if problem:
        logger.error("a delta was not taken: %s", problem)
    failed = torch.tensor([float(bool(problem))], device=device)
    distributed.all_reduce(failed)
    if distributed.get_rank() == 0:
        elsewhere = "another process of the engine could not take the delta" if failed.item() else ""
        try:
            Path(order.answer).write_text(problem or elsewhere or TAKEN)
        except OSError:  # the disk is full, say: no answer is an answer too
            logger.exception("it could not be told whether a delta was taken")


def _payloads(order: TakeDelta, device: torch.device) -> Iterator[Tensor]:
    """One a bucket, [n] uint8 on the CPU."""
    if order.manifest.via == "folder":
        yield from folder.read_deltas(Path(order.source))
        return
    group: Any = _resolve_process_group(order.source)  # pyright: ignore[reportArgumentType]
    for _ in buckets(order.manifest):
        size = torch.empty(1, dtype=torch.int64, device=device)
        distributed.broadcast(size, src=0, group=group)
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
        distributed.broadcast(payload, src=0, group=group)
        yield payload.cpu()


def load(model: Any, payload: Tensor, manifest: Manifest, place: slice) -> str:
    """Take one bucket.

    Args:
        model: with SGLang's `load_weights`.
        payload: [n] uint8, on the CPU.
        place: of the bucket, in the manifest.

    Returns:
        What went wrong; the model may then hold some of it.
    """
    try:
        parts = list(delta.parts(payload))  # all of them are sound, before any is taken
        device = next(model.parameters()).device
        kinds = zip(manifest.dtypes[place], manifest.shapes[place], strict=True)
        tensors = (_tensor(*part, kind, device) for part, kind in zip(parts, kinds, strict=True))
        model.load_weights(
            (name, tensor)
            for name, tensor in zip(manifest.names[place], tensors, strict=True)
            if tensor.numel() != 1 or not isinstance(tensor, Changed)  # a single item is read, not moved
        )
    except Exception as e:  # somebody's code, and SGLang would end with it
        return f"{type(e).__name__}: {e}"
    return ""


def _tensor(
    part: delta.Part, steps: np.ndarray, values: np.ndarray, kind: tuple[str, tuple[int, ...]], device: torch.device
) -> Tensor:
    """One tensor of a bucket: whole, or where it changed."""
    num_items, num_bytes = math.prod(kind[1]), tensor_bytes(*kind)
    new = torch.from_numpy(values.copy()).to(device)
    if part.num_steps < 0 and len(values) == num_bytes:
        return typed(new, *kind)
    item_bytes, places = num_bytes // max(1, num_items), delta.places(steps)
    if part.num_steps < 0 or not delta.fit(places, values, num_items, item_bytes):
        raise delta.Damaged(f"the delta of tensor {part.name!r} does not fit its {num_bytes} bytes")
    items = torch.zeros(num_items, item_bytes, dtype=torch.uint8, device=device)
    known = torch.zeros(num_items, dtype=torch.bool, device=device)
    where = torch.from_numpy(places).to(device)
    items[where], known[where] = new.reshape(-1, item_bytes), torch.tensor(True, device=device)
    return Changed(typed(items.reshape(-1), *kind), known.reshape(kind[1]))
