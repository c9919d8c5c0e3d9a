"""The embedded engine's server, with a wire that flips one bit of the second push."""

import os
from unittest import mock

import torch

from runtime.rollout.embedded import __main__ as embedded
from runtime.rollout.embedded import updates


class FlippingReceiver(updates.BroadcastReceiver):
    pushes = 0

    def receive(self, *what, **how):
        tensors = super().receive(*what, **how)
        self.pushes += 1
        if self.pushes == 2:
            _, tensor = tensors[-1]
            tensor.view(-1).view(torch.uint8)[0] ^= 1
        return tensors


with mock.patch.object(updates, "BroadcastReceiver", FlippingReceiver):
    code = embedded.main()
os._exit(code)
