"""Draw the runs of `grpo.py`: `python examples/rollouts/draw.py` writes curves of reward and where the time goes."""

import argparse
import json
from pathlib import Path
from statistics import mean, median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--runs", default="runs/rollouts", help="the folder with the figures of the runs")
parser.add_argument("--output", default="runs/rollouts/grpo.png")
arguments = parser.parse_args()

COLORS = ["tab:blue", "tab:orange", "tab:green", "tab:red"]
PARTS = {"generate": "tab:blue", "reward": "tab:gray", "train": "tab:orange"}
WINDOW = 10  # updates in a mean of the curves

runs = [json.loads(path.read_text()) for path in sorted(Path(arguments.runs).glob("grpo-*.json"))]
stages = sorted({run["stage"] for run in runs})
figure, (curves, times) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1])

for run in runs:
    rewards = run["rewards"]
    smooth = [mean(rewards[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(rewards))]
    place = stages.index(run["stage"])
    style = {"color": COLORS[place], "linestyle": ["-", "--", ":", "-."][place], "linewidth": 1.2}
    curves.plot(smooth, label=f"stage {run['stage']}, seed {run['seed']}", **style)
curves.set(xlabel="update", ylabel="mean reward", ylim=(0, 1.02), title="Reward")
curves.grid(alpha=0.3)
curves.legend(fontsize=7, ncols=len(stages))

for at, stage in enumerate(stages):
    bottom = 0.0
    for part, color in PARTS.items():
        height = 1000 * mean(median(run[part]) for run in runs if run["stage"] == stage)
        times.bar(at, height, bottom=bottom, color=color, label=part if at == 0 else None)
        if height > 10:
            times.text(at, bottom + height / 2, f"{height:.0f}", ha="center", va="center", fontsize=8)
        bottom += height
times.set_xticks(range(len(stages)), [f"stage {stage}" for stage in stages])
times.set(ylabel="ms an update (median)", title="Where the time goes")
times.legend(fontsize=7)

figure.tight_layout()
Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output, dpi=110)
for run in runs:
    first, last = mean(run["rewards"][:WINDOW]), mean(run["rewards"][-WINDOW:])
    seconds = sum(map(sum, (run["generate"], run["reward"], run["train"])))
    difference = max(run["largest_difference"])
    print(
        f"stage {run['stage']}, seed {run['seed']}: reward {first:.3f} -> {last:.3f} in {len(run['rewards'])} updates, "
        f"{seconds:.0f} s; a training forward differs from generation by at most {difference:.2g}"
    )
print(arguments.output)
