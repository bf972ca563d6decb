"""A first compilation and step, which load modules and fill torch's caches: forked ranks find these full."""

import gc
import weakref

import torch
from torch import nn

import fxpipe
import fxpipe.api.load


class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def run() -> None:
    torch.set_num_threads(1)
    # The first backward starts a thread for each GPU. After a trace on fake tensors, a build for CUDA would
    # count GPUs that are not there.
    torch.ones((), requires_grad=True).backward()
    net, x = Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(8, 4)
    pipe = fxpipe.compile(net, (x[:2],), ranks=2, microbatches=4, schedule="zb-h1")
    pipe.run_local((x,))
    torch.optim.AdamW(net.parameters()).step()


if torch.accelerator.device_count() == 0:  # no fork can have a backward after one that started threads
    run()
    # Imported objects stay: ranks need not look for garbage among them, and copy no pages for that.
    gc.collect()
    gc.freeze()
    # At its end a rank would take hundreds of torch's libraries apart, op by op.
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
