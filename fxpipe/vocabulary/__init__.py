"""Finds vocabulary layers in the captured step and splits them over all ranks (2411.05288)."""
