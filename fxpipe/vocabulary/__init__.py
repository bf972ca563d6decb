"""Vocabulary layers found in the captured step and spread over all ranks (2411.05288)."""
