"""Compares the losses and step times of two runs of `normfuse train`.

python benchmarks/compare_runs.py A/metrics.jsonl B/metrics.jsonl
"""

import json
import statistics
import sys


def steps(path: str) -> dict[int, dict]:
    with open(path) as lines:
        records = [json.loads(line) for line in lines]
    return {r["step"]: r for r in records if "loss" in r}


def main() -> None:
    a, b = (steps(path) for path in sys.argv[1:])
    shared = sorted(a.keys() & b.keys())
    differences = [a[s]["loss"] - b[s]["loss"] for s in shared]
    half = len(shared) // 2  # the second half: compilation and warm-up are over
    times = [statistics.median(run[s]["step_time_s"] for s in shared[half:]) for run in (a, b)]
    print(f"{len(shared)} steps in both; losses of the last: {a[shared[-1]]['loss']:.4f}, ", end="")
    print(f"{b[shared[-1]]['loss']:.4f}")
    print(f"first loss differs by {differences[0]:+.2e}, the largest difference is ", end="")
    print(f"{max(map(abs, differences)):.2e}, the mean {statistics.mean(differences):+.2e}")
    print(f"median step: {1e3 * times[0]:.2f} ms against {1e3 * times[1]:.2f} ms, ", end="")
    print(f"ratio {times[0] / times[1]:.3f}")


if __name__ == "__main__":
    main()
