"""Runs micro-batches through all pipeline stages: forward alone, or with backward.

Every rank calls these with the same micro-batches of its data-parallel share; all ranks whose experts are shared need
as many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from runtime.trainer.base import Heads, Scores
from runtime.trainer.megatron import groups, scores
from runtime.trainer.megatron.model import Model
from runtime.trainer.megatron.packing import Packed, pack, padded_length

Sequences = tuple[Tensor, Sequence[int]]
"""tokens [T], starts [S+1]: sequences one after another, and where they start, with the end of the last."""

Finish = Callable[[int, Tensor, Packed], Any]
"""(number of the micro-batch, logits [1, L, V / tp], micro-batch), called where the logits are: in the last stage"""


def score(model: Model, batches: Sequence[Sequences], temperature: float, want: frozenset[str]) -> list[Scores]:
    """Forward without gradient; the scores of every micro-batch, on every rank of its data-parallel share.

    Args:
        want: "entropy", or nothing beside log-probs, or a critic's values.
    """

    def finish(number: int, rows: Tensor, packed: Packed) -> Scores:
        return _scores(model, rows, packed, temperature, want)

    results = forward(model, batches, finish)
    names = ("values",) if model.has_values else ("logprobs", *want & {"entropy"})
    found = []
    for number, (tokens, _) in enumerate(batches):
        empty = tokens.new_empty(len(tokens), dtype=torch.float32)
        arrays = {name: getattr(results[number], name) if results else empty.clone() for name in names}
        whole = {name: _from_last_stage(model, x) for name, x in arrays.items()}
        found.append(Scores(logprobs=whole.get("logprobs"), entropy=whole.get("entropy"), values=whole.get("values")))
    return found


def forward(model: Model, batches: Sequence[Sequences], finish: Finish) -> list[Any]:
    """What `finish` made of every micro-batch, in the last stage; elsewhere nothing. Without gradient."""
    with torch.no_grad():
        return _run(model, batches, finish, is_forward_only=True)


def train(
    model: Model,
    batches: Sequence[Sequences],
    loss: Callable[[int, Scores], tuple[Tensor, Any]],
    temperature: float,
    want: frozenset[str],
    teacher: Heads | None = None,
) -> list[Any]:
    """Forward and backward; gradients, summed over micro-batches and ranks, are then in each parameter's `main_grad`,
    which was zeroed before. Returns what `loss` gave beside the loss, in the last stage; elsewhere nothing.

    Args:
        loss: (number of the micro-batch, scores) -> (its share of the loss, already divided by the totals of the
            update; anything).
        teacher: for the divergence, in the last stage.
    """

    def finish(number: int, rows: Tensor, packed: Packed) -> tuple[Tensor, Tensor, Any]:
        head = teacher[number] if teacher else None
        value, result = loss(number, _scores(model, rows, packed, temperature, want, head))
        # With a count in the middle Megatron leaves the loss alone: of a pair it would multiply the loss by the
        # context-parallel ranks and divide it by the micro-batches, in place, and so what the caller kept of it.
        return value, torch.ones((), dtype=torch.int, device=value.device), result

    for chunk in model.chunks:
        chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
    return _run(model, batches, finish, is_forward_only=False)


def _scores(
    model: Model,
    rows: Tensor,
    packed: Packed,
    temperature: float,
    want: frozenset[str],
    teacher: Callable[[], Tensor] | None = None,
) -> Scores:
    if model.has_values:
        return scores.values(rows, packed)
    return scores.score(rows, packed, temperature, want, num_tokens=model.hf.vocab_size, teacher=teacher)


def _run(model: Model, batches: Sequence[Sequences], finish: Finish, *, is_forward_only: bool) -> list[Any]:
    p, chunks = model.parallel, model.chunks
    tp = p.tensor if p.sequence_parallel else 1
    lengths = [padded_length(starts, p.context, tp) for _, starts in batches]
    if p.pipeline > 1:  # stages receive tensors of a shape that they know before
        lengths = [max(lengths)] * len(batches)
    rank = groups.context().rank()
    packed = [
        pack(tokens, starts, rank=rank, cp=p.context, length=length)
        for (tokens, starts), length in zip(batches, lengths, strict=True)
    ]
    # Interleaved pipelining takes micro-batches in rounds of pp: the last round is filled up with one that counts zero.
    num_idle = -len(packed) % p.pipeline if p.virtual_pipeline > 1 else 0
    packed += packed[:1] * num_idle

    def step(batches: Iterator[tuple[int, Packed]], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        number, batch = next(batches)
        out = chunk(batch.tokens, batch.positions, None, packed_seq_params=batch.params)
        return out, partial(_idle if number >= len(lengths) else _counted, finish, number, batch)

    iterators = [iter(list(enumerate(packed))) for _ in chunks]
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(packed),
        seq_length=lengths[0],
        micro_batch_size=1,
        forward_only=is_forward_only,
        collect_non_loss_data=is_forward_only,
    )
    return results[: len(lengths)]


def _counted(finish: Finish, number: int, batch: Packed, out: Tensor, non_loss_data: bool = False) -> Any:
    return finish(number, out, batch)


def _idle(finish: Finish, number: int, batch: Packed, out: Tensor, non_loss_data: bool = False) -> Any:
    zero = out.float().sum() * 0.0
    return zero, torch.ones((), dtype=torch.int, device=out.device), None


def _from_last_stage(model: Model, values: Tensor) -> Tensor:
    if model.parallel.pipeline > 1:
        dist.broadcast(values, group=groups.pipeline(), group_src=model.parallel.pipeline - 1)
    return values
