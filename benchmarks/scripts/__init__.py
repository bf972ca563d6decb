"""Whole training scripts under torchrun beside one process of plain torch.

A script is written once as its author would in plain torch, and once with the changes that fxpipe's pages ask
for; what people forget to change is a variant of it.  ``python -m benchmarks.scripts`` runs both and compares
all that they note: losses, weights, evaluations, files.
"""
