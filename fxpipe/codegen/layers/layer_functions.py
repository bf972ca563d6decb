"""The functions of a program's layers.

Runs whose functions have the same text share one, in all sections of a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxpipe.codegen.expressions import Aliases
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.names import comment

INDUCTOR = "@inductor"  # the line above a function that Inductor compiles


@dataclass(frozen=True)
class LayerFunction:
    """``blocks``: the modules that it is called for.  ``compiled``: whether by Inductor."""

    name: str
    arguments: tuple[str, ...]
    body: tuple[str, ...]
    compiled: bool
    blocks: list[str]

    def source(self) -> str:
        about = comment(from_to(self.blocks))
        head = wrapped(f"def {self.name}({', '.join(self.arguments)}):")
        return "\n".join([*[INDUCTOR] * self.compiled, head, f"    {about}", *self.body])


@dataclass
class LayerFunctions:
    """The functions of a program's runs."""

    names: Aliases
    functions: dict[tuple[tuple[str, ...], tuple[str, ...], bool], LayerFunction] = field(
        default_factory=dict
    )

    def function(
        self,
        like: str,
        arguments: Sequence[str],
        lines: Sequence[str],
        blocks: Iterable[str],
        compiled: bool,
    ) -> str:
        """The name of the function with this text: a new one only if the text is new."""
        key = tuple(arguments), tuple(lines), compiled
        self.names.uses_inductor |= compiled
        if key not in self.functions:
            self.functions[key] = LayerFunction(self.names.new(like), *key, [])
        known = self.functions[key].blocks
        known += [block for block in blocks if block not in known]
        return self.functions[key].name


def from_to(paths: Sequence[str]) -> str:
    """The modules of a run, for a comment."""
    first, last = (path or "the model itself" for path in (paths[0], paths[-1]))
    return first if first == last else f"{first} … {last}"
