"""Saved activations offloaded between F and B or W: the planner, the transfers, the memory pool."""
