"""The cuts of a step, and the choice of cut, schedule and mesh: the fastest of the candidates."""
