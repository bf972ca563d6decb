"""Schedules to the instructions of each rank: messages, collectives, transfers, and the deadlock proof."""
