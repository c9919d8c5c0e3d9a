"""The embedded engine's server, with a wire that flips one bit of the second push."""

import os
from unittest import mock

import torch

from runtime.rollout.embedded import __main__ as embedded
from runtime.rollout.embedded import server


class FlippingReceiver(server.BroadcastReceiver):
    pushes = 0

    def receive(self, *what):
        tensors = super().receive(*what)
        self.pushes += 1
        if self.pushes == 2:
            _, tensor = tensors[-1]
            tensor.view(-1).view(torch.uint8)[0] ^= 1
        return tensors


with mock.patch.object(server, "BroadcastReceiver", FlippingReceiver):
    code = embedded.main()
os._exit(code)
