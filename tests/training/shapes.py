"""The shapes in which outputs and evaluation are tried: options of ``fxpipe.compile``."""

SHAPES = {
    "one rank": {"ranks": 1},
    "two ranks": {"ranks": 2, "schedule": "zb-h1"},
    "three ranks": {"ranks": 3, "schedule": "gpipe"},
    "four ranks": {"ranks": 4, "schedule": "1f1b"},
    "V": {"ranks": 2, "schedule": "zb-v"},
    "V of three": {"ranks": 3, "schedule": "1f1b-v"},
    "interleaved": {"ranks": 2, "schedule": "interleaved", "stages_per_rank": 2},
    "recompute": {"ranks": 2, "recompute": "full"},
    "offload": {"ranks": 2, "schedule": "gpipe", "offload": True},
    "split points": {"ranks": 2, "split_points": ["blocks.1"]},
}
