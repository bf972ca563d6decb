"""Lines of functions: what is freed where, which ops share a line, and what constants say."""

import re

import torch
from torch import nn

import fxpipe
from fxpipe.codegen.statements import Statement, body


def test_what_is_dead_is_freed_where_memory_is_needed():
    lines = [
        Statement("a = sin(x)", ("x",), "# first", frees=True),
        Statement("b = exp_out(a, out=a)", ("a",), "# first", frees=True, allocates=False),
        Statement("c = reshape(b, [4])", ("b",), "# second", frees=True, allocates=False),
        Statement("d = mm(c, w)", ("c", "w"), "# second", frees=True),
        Statement("e = cos(d)", ("d",), "# third"),
    ]
    storages = {"b": "a", "c": "a"}
    assert body(lines, ["e"], storages) == [
        "    # first",
        "    a = sin(x)",
        "    b = exp_out(a, out=a)",
        "    # second",
        "    c = reshape(b, [4])",
        "    del x",
        "    d = mm(c, w)",
        "    del a, b, c, w",
        "    # third",
        "    e = cos(d)",
    ]


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, bias=False), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x).flatten(0, 1)[:, 1:].sin()).square().mean()


def programs(**options) -> tuple[str, ...]:
    options = {"ranks": 1, "microbatches": 4, "schedule": "1f1b"} | options
    return fxpipe.compile(Sliced(), {"x": torch.randn(2, 3, 8)}, **options).artifact.programs


def test_a_slice_up_to_the_end_says_so():
    (program,) = programs()
    assert "\nEND = 9223372036854775807  # of a slice up to the end\n" in program
    assert re.search(r"\bslice\(.*, 1, 1, END\)", program)
    assert program.count("9223372036854775807") == 1


def test_an_op_stands_in_the_line_of_the_view_of_its_result():
    (program,) = programs()
    assert re.search(r"= (slice|reshape)\(.*mm\(reshape\(batch\[\"x\"\], \[6, 8\]\), t\(", program)


def test_the_gradient_of_the_loss_says_why_it_is_a_number():
    (program,) = programs()
    assert re.search(r"= full\(\[\], 0\.25, .*\)  # 1 / microbatches\n", program)
    (program,) = programs(microbatches=1)
    assert "microbatches\n" not in program.partition("def step(")[0].partition("import torch")[2]
