"""Hooks: those that change values are captured, of all others ``compile`` says that no step calls them."""

import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fxpipe
from fxpipe.capture.capture_options import CAPTURE_ALL
from fxpipe.capture.trace import capture


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("largest", torch.zeros(()))
        self.of_tensor = None

    def forward(self, x):
        x = self.a(x).relu()
        if self.of_tensor is not None:
            x.register_hook(self.of_tensor)
        return self.b(x).square().mean()


def look(*args):
    """Sees values, and changes none."""
    [x.sum() for x in args if isinstance(x, torch.Tensor)]


class Collects:
    def __init__(self):
        self.seen = []

    def __call__(self, module, args, result):
        self.seen.append(result.detach().clone())


LINE = look.__code__.co_firstlineno

#: How to register a hook -> how it is called in the warning.
SILENT = {
    "forward hook look {} of the module a ran": lambda net: net.a.register_forward_hook(look),
    "forward pre-hook look {} of the model ran": lambda net: net.register_forward_pre_hook(partial(look)),
    "backward hook look {} of the module b ran": lambda net: net.b.register_full_backward_hook(look),
    "backward pre-hook look {} of the module b ran": lambda net: net.b.register_full_backward_pre_hook(look),
    "forward hook look {} of all modules ran": lambda net: register_module_forward_hook(look),
    "hook look {} of the gradient of b.weight ran": lambda net: net.b.weight.register_hook(look),
    "hook look {} of a tensor's gradient, registered at ": lambda net: setattr(net, "of_tensor", look),
    "forward hook look {} of the module unused never ran": lambda net: net.unused.register_forward_hook(look),
    "state-dict hook look {} of the module a is not called": lambda net: net.a.register_state_dict_post_hook(
        look
    ),
    "load-state-dict pre-hook look {} of the model is not": (
        lambda net: net.register_load_state_dict_pre_hook(look)
    ),
}


def messages(net, options=CAPTURE_ALL):
    """The warnings about a model's hooks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture(net, {"x": torch.randn(2, 4)}, None, 1.0, torch.device("cpu"), options)
    return [text for text in (str(one.message) for one in found) if re.match("The .*hook .* of ", text)]


@pytest.mark.parametrize("says", [*SILENT])
def test_a_hook_that_changes_nothing_is_named_with_its_line(says):
    net = Net()
    handle = SILENT[says](net)
    try:
        (text,) = messages(net)
    finally:
        if handle is not None:
            handle.remove()
    assert says.replace("look {}", f"test_hooks.look (test_hooks.py:{LINE})") in text


def test_hooks_of_gradients_are_not_missed_where_there_is_no_backward():
    net = Net()
    net.b.weight.register_hook(look)
    net.b.register_full_backward_hook(look)
    assert messages(net, replace(CAPTURE_ALL, gradients=False)) == []


def test_a_hook_that_is_an_object():
    net = Net()
    net.a.register_forward_hook(collects := Collects())
    (text,) = messages(net)
    assert re.search(r"forward hook test_hooks\.Collects \(test_hooks\.py:\d+\) of the module a ran", text)
    assert [*net.a._forward_hooks.values()] == [collects]  # as it was
    assert collects.seen == []


def keep_largest(module, args, result):
    module.largest.copy_(result.detach().max())


def ask_for_gradients(module, args, result):
    result.requires_grad_()


#: Hooks that change a value in each step: by what they return, set and write.
CAPTURED = {
    "returns": lambda net: net.a.register_forward_hook(lambda module, args, result: 2 * result),
    "writes": lambda net: net.register_forward_hook(keep_largest),
    "weight norm": lambda net: nn.utils.weight_norm(net.a),
    "asks for gradients": lambda net: net.a.register_forward_hook(ask_for_gradients),
    "gradient": lambda net: net.a.weight.register_hook(lambda grad: 3 * grad),
    "backward": lambda net: net.b.register_full_backward_hook(lambda module, given, _: (2 * given[0],)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", [*CAPTURED])
def test_a_hook_that_changes_a_value_is_captured(name):
    torch.manual_seed(0)
    net = Net()
    CAPTURED[name](net)
    assert messages(net) == []
    batch = {"x": torch.randn(4, 4)}
    pipe = fxpipe.compile(net, {"x": batch["x"][:2]}, ranks=1, microbatches=2, schedule="1f1b", check=False)
    found = pipe.run_local(batch)
    for rows in batch["x"].split(2):
        (net(rows) / 2).backward()
    for key, parameter in net.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.grads[key], parameter.grad)


MASK = torch.arange(4) % 2

#: Hooks of a gradient -> how the warning names the op; "" for what is the same for the sum of microbatches.
OF_PARAMETERS = {
    r"weight .*: clamp ": lambda grad: grad.clamp(-1e-3, 1e-3),
    r"weight .*: div ": lambda grad: grad / (grad.norm() + 1),
    r"weight .*: sign ": lambda grad: 0.1 * grad.sign(),
    r"weight .*: add ": lambda grad: grad + torch.ones(4, 4),
    r"weight .*: where ": lambda grad: torch.where(grad.abs() > 1e-2, grad, 0),
    "": lambda grad: torch.where(MASK > 0, 0.5 * grad * MASK - grad.mean(1, keepdim=True), 0),
}


def _told_of(net, **options):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fxpipe.compile(net, (torch.randn(2, 4),), ranks=1, schedule="1f1b", check=False, **options)
    return [str(x.message) for x in given if "microbatch" in str(x.message)]


@pytest.mark.parametrize("says", OF_PARAMETERS)
def test_a_hook_of_a_parameter_that_is_not_linear_is_told(says):
    """Each microbatch's summand goes through it, not their sum."""
    net = Net()
    net.a.weight.register_hook(OF_PARAMETERS[says])
    told = _told_of(net, microbatches=2)
    assert len(told) == bool(says)
    assert not told or re.search(rf"hook of the gradient of a.{says}\(.*test_hooks.py:\d+\)", told[0])
    assert not _told_of(net, microbatches=1)
    assert not _told_of(net, microbatches=2, mean="microbatch")


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (lambda grad: grad / grad.norm(), "number of the gradients of all rows: linalg_vector_norm"),
        (lambda grad: grad * (grad.abs() < grad.abs().max()), "number of the gradients of all rows: max"),
        (lambda grad: grad.clamp(-1, 1) / (1 + grad.norm(dim=1, keepdim=True)), ""),
    ],
    ids=["norm", "largest", "of each row"],
)
def test_a_hook_that_joins_rows_is_told(hook, says):
    net = Net()
    net.of_tensor = hook
    told = _told_of(net, microbatches=2)
    assert len(told) == bool(says)
    assert not told or says in told[0]


class Beside(torch.autograd.Function):
    """The first operand; the gradient of a loss, which is not returned, is ``of`` that of the first."""

    @staticmethod
    def forward(ctx, x, hidden, of):
        ctx.shape, ctx.of = hidden.shape, of
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.of(grad, ctx.shape), None


OF_HIDDEN = {
    "ones": lambda grad, shape: torch.ones(shape),
    "in the shape of the gradient": lambda grad, shape: grad.new_full(shape, 0.1),
}


@pytest.mark.parametrize("of", OF_HIDDEN.values(), ids=OF_HIDDEN)
@pytest.mark.parametrize("name", ["mean", "labels", "shares", "sum", "none"])
def test_a_loss_that_a_function_hides_is_told_where_it_is_a_mean(name, of):
    """Each microbatch adds the gradient of its own mean; those of sums are summands of the whole batch's."""
    losses = {
        "mean": lambda h: h.square().mean(),
        "labels": lambda h: nn.functional.cross_entropy(h, torch.zeros(len(h), dtype=torch.long)),
        "shares": lambda h: (h.softmax(1).mean(0) * torch.arange(4)).sum(),
        "sum": lambda h: 1e-2 * h.square().mean(1).sum(),
    }

    class Hiding(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x).tanh()
            return self.b(Beside.apply(h, losses[name](h), of) if name in losses else h).square().mean()

    torch.manual_seed(0)
    net, batch = Hiding(), torch.randn(8, 4)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(net, (batch[:2],), ranks=1, microbatches=4, schedule="1f1b", check=False)
    gradient = pipe.run_local((batch,)).grads["a.weight"]
    net(batch).backward()
    is_told = any("begins with a gradient of its own, of a mean" in str(x.message) for x in given)
    assert is_told == (name in ("mean", "labels", "shares"))
    assert torch.allclose(gradient, net.a.weight.grad, atol=1e-6) != is_told


@pytest.mark.filterwarnings("ignore")
def test_what_hooks_keep_is_put_back():
    """A script that looks there would find tensors of the trace."""
    norms, results, model = [], [], Net()
    for parameter in (model.a.weight, model.b.weight):
        parameter.register_hook(lambda grad: norms.append(grad.norm()))
    model.a.register_forward_hook(lambda module, args, result: results.append(result))
    capture(model, {"x": torch.ones(2, 4)}, None, 1.0, torch.device("cpu"), CAPTURE_ALL)
    assert norms == results == []
