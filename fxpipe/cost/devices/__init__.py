"""Devices as data: known by name, measured here, or of all ranks."""
