# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What `import hf_ttt` costs over transformers' own modelling code, each time in a fresh interpreter.

What it loads at all is pinned by tests/test_imports.py; seconds depend on the machine, so they are measured here.

    python benchmarks/bench_import.py            # writes benchmarks/results/import.csv
"""

import argparse
import statistics
import subprocess
import sys

from common import write_rows

CODE = """
import time
start = time.perf_counter(), time.process_time()
import transformers.modeling_utils
middle = time.perf_counter(), time.process_time()
import hf_ttt
stop = time.perf_counter(), time.process_time()
print(*(after - before for before, after in zip(start + middle, middle + stop)))
"""
COLUMNS = ("transformers s", "transformers CPU s", "hf_ttt s", "hf_ttt CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="interpreters, after a first one that is not counted")
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.repeats + 1):
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        runs.append([float(number) for number in done.stdout.split()])
    medians = [statistics.median(series) for series in zip(*runs[1:], strict=True)]
    row = dict(zip(COLUMNS, (round(seconds, 3) for seconds in medians), strict=True))
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    write_rows("import", [row])


if __name__ == "__main__":
    main()
