"""The embedded engine with a fault: a byte that changes on its way in, or a client that breaks in the agent."""

import sys
import time
from pathlib import Path

import msgspec

from runtime.rollout.engines import embedded
from runtime.rollout.engines._dialect import DialectClient


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: str
    """flip: one byte of the second push; client: the agent's client raises at the second push."""
    stamp: str
    max_length: int = 64


class BrokenClient(DialectClient):
    pushes = 0

    def __init__(self, stamp, **given):
        super().__init__(**given)
        self.stamp = stamp

    async def receive(self, manifest, version, group):
        type(self).pushes += 1
        if self.pushes == 2:
            Path(self.stamp).write_text(str(time.time()))
            raise ZeroDivisionError("nobody expects this")
        await super().receive(manifest, version, group)


class Kind(embedded.EmbeddedKind):
    def __init__(self, options):
        super().__init__(embedded.Config(max_length=options.max_length))
        self.options = options

    def command(self, launch):
        argv = super().command(launch)
        if self.options.fault != "flip":
            return argv
        return [sys.executable, "-m", "tests.plugins.flipping_server", *argv[3:]]

    def client(self, **given):
        if self.options.fault != "client":
            return super().client(**given)
        return BrokenClient(self.options.stamp, **given)


def build(options: Config) -> Kind:
    return Kind(options)
