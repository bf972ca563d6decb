"""Few and small samples, so that a calibration takes a second."""

from fxpipe.cost.calibration import samples

SMALL = {"ELEMENTS": (16, 4096), "ROWS": (8, 16), "LENGTHS": (8, 16), "SIDES": (4, 8)}


def make_samples_small() -> None:
    for name, sizes in SMALL.items():
        setattr(samples, name, sizes)
