"""Exchanges between the lanes of a rank, behind ops of other microbatches.

    python benchmarks/hidden_exchanges.py --output benchmarks/results/hidden_exchanges.txt

Eight processes, four ranks of two lanes.  The layers sleep in their forward, in the gradient of their input
and in that of their weight, and lanes exchange rows behind each layer, forward and backward, on a link that
takes its time for one exchange after the other.  With ``parts="exchanges"`` a stage is cut at each exchange.

exposed: the seconds of a step beyond those of the same programs, in the same run, on a link that takes no
time, so that what eight processes on a few cores cost otherwise is in both; simulated: the same, simulated.
bound: the least that is exposed of any schedule of these stages: the first microbatch waits for
its exchanges.  Bar: what is exposed beyond the bound is at most 5% of what whole stages expose.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from launch import run
from report import Report

RANKS, LANES, LAYERS, MICROBATCHES = 4, 2, 4, 12
SLEEP, EXCHANGES = 0.02, (0.01, 0.02)  # seconds of each phase of a layer, and of an exchange
STEPS = 3
WAYS = (
    ("1f1b", 1),
    ("zb-h1", 1),
    ("zb-v", 1),
    ("1f1b", "exchanges"),
    ("zb", "exchanges"),
    ("zb-v", "exchanges"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Exchanges between lanes, behind ops of other microbatches")
    report.line(
        f"\n{RANKS} ranks of {LANES} lanes, {LAYERS} layers a rank, {MICROBATCHES} microbatches; F, B and W "
        f"of a layer {1e3 * SLEEP:g} ms each"
    )
    columns = (
        "schedule",
        "parts",
        "exchange",
        "measured",
        "without",
        "exposed",
        "simulated",
        "bound",
        "of whole",
        "simulated",
    )
    rows, whole = list[tuple[str, ...]](), dict[tuple[str, float], tuple[float, ...]]()
    for exchange in EXCHANGES:
        case = {"exchange": exchange, "ways": WAYS}
        for (schedule, parts), found in zip(WAYS, run("hidden_exchanges_worker.py", 8, case), strict=True):
            both = found["seconds"] - found["without"], found["simulated"] - found["simulated_without"]
            key = "v" if schedule == "zb-v" else "plain", exchange
            if parts == 1:
                whole[key] = tuple(map(min, both, whole.get(key, both)))
            shares = [(x - found["bound"]) / of for x, of in zip(both, whole[key], strict=True)]
            rows.append((
                schedule, str(parts), f"{1e3 * exchange:g} ms", f"{found['seconds']:.3f} s",
                f"{found['without']:.3f} s", *(f"{1e3 * x:.0f} ms" for x in (*both, found["bound"])),
                *(f"{100 * share:.1f}%" for share in shares),
            ))  # fmt: skip
    report.line()
    report.table(columns, rows)
    report.save(options.output)


if __name__ == "__main__":
    main()
