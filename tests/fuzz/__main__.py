"""Runs more fuzz cases than the tests do: `python -m fuzz --cases 6000`, from the folder `tests`.

Models are random, each drawn from one seed. References that are independent of the package judge the results. Reading
order: draw, reference, tower_reference, judge, batch, kinds (a folder: one file for each kind of case), differential;
runner.
"""

import argparse
import os
import random
import sys
import warnings


def main() -> int:
    """Run the cases that the command line names; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed (default: drawn); alone: that one case")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seconds", type=float, help="at most")
    parser.add_argument("--workers", default="auto", help="processes (default: one a core, up to eight)")
    parser.add_argument(
        "--kinds", help="only cases of these kinds, by commas; those of other seeds are passed over"
    )
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Else a matrix product may round by where its weights lie in memory, and a loaded model differs from the saved one.
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    warnings.simplefilter("ignore")

    from .suites import run_suite

    count = min(os.cpu_count() or 1, 8) if options.workers == "auto" else int(options.workers)
    first = random.SystemRandom().randrange(10**6, 10**9) if options.seed is None else options.seed
    cases = options.cases or (1 if options.seed is not None else 1000)
    workers = count if cases > 1 else 0
    kinds = None if options.kinds is None else set(options.kinds.split(","))
    return min(len(run_suite(range(first, first + cases), workers, options.seconds, kinds).failures), 1)


if __name__ == "__main__":
    sys.exit(main())
