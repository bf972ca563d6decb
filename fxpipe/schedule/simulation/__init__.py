"""A schedule run on costs: one run loop, and times, memory, idle time and the critical path of the result."""
