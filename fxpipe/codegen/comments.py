"""Shapes and dtypes as comments: of the inputs of a section, and of the ops that a reader looks for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxpipe.codegen.expressions import variable
from fxpipe.ir.graph import Kind, Section
from fxpipe.ir.names import text_literal
from fxpipe.ir.ops import has_flops
from fxpipe.ir.text import shape_text
from fxpipe.runtime.torch_private import schema_of


def shape_of(node: fx.Node) -> str:
    """``f32[2, 128, 768]`` of a product, and of an op that gives statistics beside its result, as norms and
    attentions do; "" of others.  A trace's sizes."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        value = next((part for part in value if part is not None), None)
    schema = schema_of(node.target)
    gives_several = schema is not None and len(schema.returns) > 1
    is_shown = isinstance(value, torch.Tensor) and (gives_several or has_flops(node))
    return shape_text(value) if is_shown else ""


def input_comments(section: Section, values_in: Iterable[str]) -> list[str]:
    """Comments on the parts of the batch that a section reads, and on ``values_in``, from other stages."""
    abroad, comments = set(values_in), []
    for node in section.graph.find_nodes(op="placeholder"):
        source = node.meta.get("input")
        if source is not None and source.kind is Kind.BATCH:
            comments.append(f"    # batch[{text_literal(source.name)}]: {shape_text(node.meta['val'])}")
        elif node.name in abroad:
            comments.append(f"    # {variable(node.name)}: {shape_text(node.meta['val'])}")
    return comments
