"""The engine's weights: taken in update sessions, each of which replaces all of them, and checked.

A session that named unknown tensors, or ended before every tensor had come, leaves the engine without usable weights:
it then decodes nothing until a whole session went well. While it sleeps it holds none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from runtime.comm.weights import delta, folder, tensors
from runtime.rollout.embedded.errors import Refused


class Weights:
    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._tensors = _in_files(net)
        """By the names of Hugging Face files; a tied tensor under each of its names."""
        self._received: set[str] = set()
        self._in_session = False
        self._released: list[tuple[Tensor, torch.Size]] = []
        """While asleep: tensors without memory, and their shapes."""

    @property
    def held(self) -> Mapping[str, Tensor]:
        """By Hugging Face name. What comes in a session may be written to them, and parameters may be moved."""
        return self._tensors

    def begin(self) -> None:
        if self._in_session:
            raise Refused("a weight update session is already open")
        if self._released:
            raise Refused("this engine sleeps: it has no memory for weights")
        self._in_session, self._received = True, set()

    def check_session(self) -> None:
        if not self._in_session:
            raise Refused(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these in, unless they are those that are held. Nothing of them is kept if one is refused."""
        self.check_session()
        named = list(named)
        for name, tensor in named:
            self._check(name, tensor)
        for name, tensor in named:
            self._tensors[name].copy_(tensor)
            self._received.add(name)

    def change(self, payload: Tensor) -> None:
        """Take a bucket of a delta, [n] uint8."""
        self.check_session()
        try:
            self._received.update(delta.apply(payload, self._tensors))
        except delta.Damaged as e:
            raise Refused(str(e)) from e

    def take(self, path: Path, *, is_delta: bool) -> None:
        """All the rest of a session, from a folder."""
        try:
            if is_delta:
                for payload in folder.read_deltas(path):
                    self.change(payload)
            else:
                for named in folder.read(path):
                    self.load(named.items())
            self.end()
        except (delta.Damaged, OSError) as e:
            raise Refused(str(e)) from e
        finally:
            self._in_session = False

    def _check(self, name: str, tensor: Tensor) -> None:
        mine = self._tensors.get(name)
        if mine is None:
            raise Refused(f"the model has no weight named {name!r}")
        if mine.shape != tensor.shape:
            raise Refused(f"weight {name!r}: shape {tuple(tensor.shape)} was sent, the model has {tuple(mine.shape)}")
        if mine.dtype != tensor.dtype:
            raise Refused(f"weight {name!r}: {tensor.dtype} was sent, the engine holds {mine.dtype}")

    def end(self) -> None:
        """Close the session.

        Raises:
            Refused: none is open, or some tensors did not come.
        """
        if not self._in_session:
            raise Refused("no weight update session is open")
        self._in_session = False
        came = {id(self._tensors[name]) for name in self._received}
        missing = [name for name, tensor in self._tensors.items() if id(tensor) not in came]
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise Refused(f"{len(missing)} of {len(self._tensors)} weights were not sent: {shown}")

    def digests(self) -> dict[str, str]:
        if self._in_session:
            raise Refused("a weight update session is open")
        if self._released:
            raise Refused("this engine sleeps: it holds no weights")
        return tensors.digests(self._tensors.items())

    # ---- sleep

    def release(self) -> None:
        """Give the memory back; what it held is gone."""
        if self._in_session:
            raise Refused("a weight update session is open")
        if not self._released:
            self._tensors = {}
            whole = {id(t): t for t in self._net.state_dict(keep_vars=True).values()}
            self._released = [(t, t.shape) for t in whole.values()]
            self._lay([torch.Size([0])] * len(self._released))

    def resume(self) -> None:
        """Have memory again, for weights to come."""
        self._lay([shape for _, shape in self._released])
        self._released, self._tensors = [], _in_files(self._net)

    def _lay(self, shapes: Sequence[torch.Size]) -> None:
        """New memory for all tensors. (A storage whose bytes were digested cannot be resized.)"""
        with torch.inference_mode(False):
            for (tensor, _), shape in zip(self._released, shapes, strict=True):
                tensor.data = torch.empty(shape, dtype=tensor.dtype)


def _in_files(net: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved, as Hugging Face files hold them: where transformers stacks the experts of
    a layer, a view of each."""
    found: dict[str, Tensor] = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        told = revert_weight_conversion(net, {name: tensor.detach().to("meta")})  # pyright: ignore[reportArgumentType]
        if [*told] == [name] and told[name].shape == tensor.shape:
            found[name] = tensor
        else:
            found |= _views(net, name, tensor.data)
    return found


def _views(net: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Name in files -> the part of the tensor that it is: where its items lie is seen from numbers in their place."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    found: dict[str, Tensor] = {}
    for key, part in revert_weight_conversion(net, {name: numbers}).items():  # pyright: ignore[reportArgumentType]
        first = int(part.flatten()[0])
        strides = [
            int(part.select(dim, 1).flatten()[0]) - first if size > 1 else 1 for dim, size in enumerate(part.shape)
        ]
        found[key] = tensor.as_strided(part.shape, strides, tensor.storage_offset() + first)
    return found
