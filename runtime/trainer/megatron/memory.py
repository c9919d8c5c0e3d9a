"""Gives a sleeping trainer's device memory back, and takes it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from runtime.device import release_memory
from runtime.trainer.megatron.model import Model
from runtime.trainer.megatron.optimizer import AdamW


class Memory:
    """Of a model and its optimizer. Megatron's tensors are views of a few large storages, so those are emptied and
    filled again: every view stays what it was."""

    def __init__(self, model: Model, optimizer: AdamW) -> None:
        self._model, self._optimizer = model, optimizer
        self._asleep: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def sleep(self) -> None:
        if self._asleep:
            return
        gradients = {buffer.grad_data.untyped_storage().data_ptr() for buffer in self._buffers()}
        for storage in self._storages():
            # Gradients are zeroed before they are used again.
            kept = None if storage.data_ptr() in gradients else storage.cpu().clone()
            self._asleep.append((storage, storage.nbytes(), kept))
        for storage, _, _ in self._asleep:
            storage.resize_(0)
        release_memory(next(self._tensors()).device)

    def wake(self) -> None:
        for storage, size, kept in self._asleep:
            storage.resize_(size)
            if kept is not None:
                storage.copy_(kept)
        self._asleep = []

    def _buffers(self) -> Iterator[Any]:
        chunks: list[Any] = self._model.chunks
        for chunk in chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in self._model.chunks:
            yield from chunk.parameters()
            yield from torch.nn.Module.buffers(chunk)
        for buffer in self._buffers():
            yield buffer.grad_data
        yield from self._optimizer.tensors()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each once."""
        found = {s.data_ptr(): s for s in (t.data.untyped_storage() for t in self._tensors()) if s.nbytes()}
        return list(found.values())
