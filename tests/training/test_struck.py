"""A rank that is killed in a step: the other one names it, and what was written before it is read."""

import copy
import re
import socket
import subprocess
import sys

import torch
from torch import nn

import fxpipe

# One interpreter, which forks: the second rank is killed in its third step.
RANKS = """
import os, signal, sys
import torch
import fxpipe.api.checkpointer, fxpipe.api.load
directory, port = sys.argv[1:]
rank = int(os.fork() == 0)
os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
pipe = fxpipe.load(directory + "/saved")
optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)

def begins(op):
    if rank == 1 and pipe.step_number == 2 and op == "F1.1":
        os.kill(os.getpid(), signal.SIGKILL)

pipe.runtime.record.at_op = begins
with fxpipe.Checkpointer(pipe, directory + "/checkpoints", optimizer=optimizer, every=2) as checkpoints:
    while pipe.step_number < 4:
        pipe.step((torch.arange(32.0, dtype=torch.float64).view(8, 4).sin(),))
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
        checkpoints.wait()
"""


class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_rank_that_is_killed_in_a_step_is_named_and_the_checkpoint_before_it_is_read(tmp_path):
    torch.manual_seed(0)
    model = Net(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    data = torch.arange(32.0, dtype=torch.float64).view(8, 4).sin()
    pipe = fxpipe.compile(copy.deepcopy(model), (data[:2],), ranks=2, microbatches=4, schedule="1f1b")
    pipe.save(tmp_path / "saved")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", RANKS, str(tmp_path), port]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    named = (
        r"Rank 1 gives no sign of life any more \(killed, or out of memory\); .*"
        r"Rank 0 waits for rank 1, to run BW0\.\d \(stage 0, microbatch \d\) of step 2"
    )
    assert re.search(named, ended.stderr), ended.stderr

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(data).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = fxpipe.read_checkpoint(tmp_path / "checkpoints")
    assert found.step_number == 2
    torch.testing.assert_close(found.model, dict(model.state_dict()), rtol=1e-12, atol=0)
