"""Types of fields of a plan, with their bounds: sizes, shapes, dtypes by name, polynomials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from fxpipe.strict import Fits, between, entries

GRAD_DTYPES = ("torch.float32", "torch.float64")
"""The dtypes in which gradients of parameters with fewer bits can be accumulated."""

MOST_BYTES, MOST_DIMENSIONS = 1 << 48, 64


def _is_shape(sizes: tuple[int, ...]) -> bool:
    return len(sizes) <= MOST_DIMENSIONS and math.prod(sizes) <= MOST_BYTES


def _dtype(name: str) -> Any:
    from fxpipe.plan.tensors import dtype_of  # it imports torch, which the help of commands does not need

    return dtype_of(name)


def _is_floating(name: str) -> bool:
    dtype = _dtype(name)
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


IS_DTYPE = Fits(lambda name: _dtype(name) is not None, "a dtype such as 'torch.float32'")
IS_FLOATING = Fits(_is_floating, "a floating-point dtype such as 'torch.float32'")

Size = Annotated[int, between(0, MOST_BYTES)]
Shape = Annotated[
    tuple[Size, ...],
    Fits(_is_shape, f"of at most {MOST_DIMENSIONS} dimensions and {MOST_BYTES} elements"),
]
Dtype = Annotated[str, IS_DTYPE]
FloatingDtype = Annotated[str, IS_FLOATING]
GradDtype = Annotated[
    str,
    Fits(("", *GRAD_DTYPES).__contains__, "empty, 'torch.float32' or 'torch.float64'"),
]

MOST_POWER, MOST_TERMS = 16, 1024


def _is_term(numbers: tuple[int, ...]) -> bool:
    return (
        len(numbers) >= 2
        and numbers[1] >= 1
        and min(numbers[2:], default=0) >= 0
        and sum(numbers[2:]) <= MOST_POWER
    )


#: A polynomial of the named lengths, of each term the numerator, the denominator and the exponents:
#: rows · (sequence² / 2 - 1) is ((1, 2, 1, 2), (-1, 1, 1, 0)).
Terms = Annotated[
    tuple[
        Annotated[
            tuple[int, ...],
            Fits(
                _is_term,
                f"a numerator, a denominator from 1 on, and exponents of at most {MOST_POWER} in all",
            ),
        ],
        ...,
    ],
    entries(0, MOST_TERMS),
]


def value_at(terms: Terms, lengths: Sequence[Any]) -> Any:
    """The polynomial's value for lengths that are fractions or symbols; exact."""
    # Of the type of the lengths, also where there is no term.
    total = 0 * lengths[0] if lengths else 0
    for numerator, denominator, *powers in terms:
        total += numerator * math.prod(map(pow, lengths, powers)) / denominator
    return total
