"""Runs campaigns, in two processes, and prints a line for each: `python -m tests.fuzz --help`."""

from __future__ import annotations

import argparse
import sys
import time

from .runner import CHECKED, campaigns, run_campaign, run_checked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help="campaigns to run; all if none is given")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the inputs to run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="one input of the campaign, in this process")
    args = parser.parse_args()
    known = campaigns()
    if unknown := set(args.names) - {*known, CHECKED}:
        parser.error(f"no campaign {sorted(unknown)[0]!r}, expected {[*known, CHECKED]}")
    if args.only is not None:
        (name,) = args.names
        report = known[name].run(args.seed, range(args.only, args.only + 1))
        print(dict(report.outcomes), *report.findings, sep="\n")
        return 1 if report.findings else 0
    print(f"seed {args.seed}")
    failed = False
    for name in args.names or [*known, CHECKED]:
        start = time.monotonic()
        if name == CHECKED:
            report = run_checked(args.seed, args.scale)
        else:
            report = run_campaign(known[name], args.seed, args.scale, args.processes)
        counts = ", ".join(f"{n} {what.strip('+')}" for what, n in sorted(report.outcomes.items()))
        seconds, found = time.monotonic() - start, len(report.findings)
        print(
            f"{name}: {report.inputs} inputs, {found} findings, {seconds:.0f} s ({counts})",
            flush=True,
        )
        for finding in report.findings[:5]:
            print(finding, flush=True)
        failed |= bool(report.findings)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
