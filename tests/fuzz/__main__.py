"""Run more fuzz cases than the tests do: `make fuzz N=6000`.

Each case draws a model and what is done with it from one seed, and compares the results with a decoder in float64 that
uses nothing of llamoe. Reading order: reference, draw, judge, batch, subject, kinds (a file for each kind of case),
runner.
"""

import argparse
import os
import random
import sys

from .runner import FAULTS, run_seeds


def main() -> int:
    """Run the cases that the command line names; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--seed", type=int, help="first seed (default: random); without --cases, the only one"
    )
    parser.add_argument("--cases", type=int)
    workers = min(os.cpu_count() or 1, 8)
    parser.add_argument("--workers", type=int, default=workers, help="processes (default: up to eight)")
    parser.add_argument("--kinds", help="skip the seeds of all kinds but these, separated by commas")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(10**6, 10**9) if options.seed is None else options.seed
    cases = options.cases or (1 if options.seed is not None else 1000)
    kinds = None if options.kinds is None else set(options.kinds.split(","))
    counts = run_seeds(range(first, first + cases), options.workers if cases > 1 else 0, kinds)
    return int(any(counts[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
