"""Which pipeline stage holds which layers: decided here, told to Megatron-Core, and used to find weights again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from runtime.trainer.megatron.table import Row


@dataclass(frozen=True)
class Stages:
    """Layers dealt as evenly as can be over `pp` stages, each of `vpp` model chunks.

    Chunk c of stage s comes at place c * pp + s. Where it does not come out even, the first and the last place, which
    also hold the embedding and the output layer, are the last to get one more.
    """

    num_layers: int
    pp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        assert self.pp * self.vpp <= self.num_layers and (self.vpp == 1 or self.pp > 1), "topology.check_cut saw to it"

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each place."""
        places = self.pp * self.vpp
        least, more = divmod(self.num_layers, places)
        order = sorted(range(places), key=lambda place: (place in (0, places - 1), place))
        favoured = set(order[:more])
        return tuple(least + (place in favoured) for place in range(places))

    def first_layer(self, stage: int, chunk: int) -> int:
        return sum(self.counts[: chunk * self.pp + stage])

    def stage_of(self, row: Row) -> int:
        if row.layer is None:
            return 0 if row.megatron.startswith("embedding.") else self.pp - 1
        place = next(p for p in range(len(self.counts)) if row.layer < sum(self.counts[: p + 1]))
        return place % self.pp

    def layout(self) -> list[list[str]] | None:
        """As Megatron-Core takes it; None for one stage."""
        if self.pp == 1:
            return None
        places = [["decoder"] * count for count in self.counts]
        return [["embedding", *places[0]], *places[1:-1], [*places[-1], "loss"]]
