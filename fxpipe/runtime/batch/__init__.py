"""The batch of a step: its microbatches, their lengths, and the outputs that are asked for."""
