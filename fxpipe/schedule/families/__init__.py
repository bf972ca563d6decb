"""The schedules that have names: one small function each, and their registry."""
