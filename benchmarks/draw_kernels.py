"""Draws the table that `gpu_kernels.py` prints.

python benchmarks/draw_kernels.py benchmarks/results/2026-11-21_h200_kernels.txt docs/kernels.png
"""

import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PASSES = ["forward", "backward", "residual add + norm, forward", "residual add + norm, backward"]
CELL = re.compile(r"us ([\d.]+) \(([\d.]+)\)")


def main() -> None:
    source, target = sys.argv[1:]
    with open(source) as lines:
        title = next(lines).split(",")[0]
        rows = {
            m[1]: CELL.findall(m[2])
            for m in map(re.compile(r" *\d+ x (\d+)(.*)").match, lines)
            if m
        }
    widths = sorted(rows, key=int)
    figure, panels = plt.subplots(1, 4, figsize=(15, 3.4), sharey=True, layout="constrained")
    for i, (panel, name) in enumerate(zip(panels, PASSES, strict=True)):
        for side, (label, color) in enumerate([("normfuse", "#1f6feb"), ("XLA", "#b8c0cc")]):
            heights = [float(rows[n][i][side]) for n in widths]
            at = [x + 0.4 * side for x in range(len(widths))]
            panel.bar(at, heights, 0.4, label=label, color=color)
        panel.set_xticks([x + 0.2 for x in range(len(widths))], widths, rotation=60)
        panel.axhline(1, color="#444", linewidth=0.8)
        panel.set(title=name, xlabel="features", ylim=(0, 1.08))
    panels[0].set_ylabel("fraction of copy rate")
    panels[0].legend(loc="lower left", framealpha=1)
    figure.suptitle(f"RMSNorm, bfloat16 with float32 scale, on one {title}: higher is better")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
