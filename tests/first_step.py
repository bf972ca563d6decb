"""A first compilation and step, which load modules and fill torch's caches: forked ranks find these full."""

import weakref

import frozen_imports
import torch
from zoo import CASES, Shape, compiled

import fxpipe.api.load  # noqa: F401 - ranks load


def run() -> None:
    torch.set_num_threads(1)
    # The first backward starts a thread for each GPU. After a trace on fake tensors, a build for CUDA would
    # count GPUs that are not there.
    torch.ones((), requires_grad=True).backward()
    case = CASES["tied_head"]
    for shape in (Shape(2, "zb-h1", 2, "v"), Shape(2, "zb-v", vocab_parallel="2-barrier")):
        model = case.build()
        pipe = compiled(case, model, 2, shape)
        pipe.run_local(case.data(2))
    torch.optim.AdamW(model.parameters()).step()


if torch.accelerator.device_count() == 0:  # no fork can have a backward after one that started threads
    run()
    # Ranks need not look for garbage among imported objects, and copy no pages for that.
    frozen_imports.freeze()
    # At its end a rank would take hundreds of torch's libraries apart, op by op.
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
