"""The engine's weights: taken in update sessions, each of which replaces all of them, and checked.

A session that named unknown tensors, or ended before every tensor had come, leaves the engine without usable weights:
it then decodes nothing until a whole session went well.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from runtime.comm.weights import digest
from runtime.rollout.embedded.errors import Refused


class Weights:
    def __init__(self, net: nn.Module) -> None:
        self._tensors = dict(net.named_parameters(remove_duplicate=False))
        """By Hugging Face name; a tied tensor under each of its names."""
        self._received: set[str] = set()
        self._in_session = False
        self.whole = False
        """All tensors came from one session."""

    @property
    def in_session(self) -> bool:
        return self._in_session

    def begin(self) -> None:
        if self._in_session:
            raise Refused("a weight update session is already open")
        self._in_session, self._received, self.whole = True, set(), False

    def check_session(self) -> None:
        if not self._in_session:
            raise Refused(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these in. Nothing of them is kept if one is refused."""
        self.check_session()
        tensors = list(tensors)
        for name, tensor in tensors:
            self._check(name, tensor)
        for name, tensor in tensors:
            self._tensors[name].copy_(tensor)
            self._received.add(name)

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
        self.whole = True

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self._tensors.items()}
