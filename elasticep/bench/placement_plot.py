"""The picture of the placement bench: two planners, four questions, one row of panels."""

from collections.abc import Mapping
from typing import Any

from elasticep.bench.report import drawing, save

# (field of both planners' figures, title, unit, subtract and scale so that 0 is ideal)
PANELS = (
    ("now", "First plan", "busiest rank above the mean, %", 1.0, 100.0),
    ("split", "Next loads, nothing moved", "busiest rank above the mean, %", 1.0, 100.0),
    ("after", "Next loads, planned again", "busiest rank above the mean, %", 1.0, 100.0),
    ("moves_percent", "... and what that moved", "% of all slots", 0.0, 1.0),
    ("lost", "Experts lost by one death", "per layer", 0.0, 1.0),
)
COLOURS = {"elasticep": "#1f77b4", "greedy": "#b0b0b0"}


def draw(path: str, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Write a PNG.

    Args:
        path: where to.
        found: figures[case][planner][field], as in the bench's JSON.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    cases = list(found)
    height = 1.6 + 0.55 * len(cases)
    figure, panels = drawing().subplots(
        1, len(PANELS), figsize=(17, height), layout="constrained", sharey=True
    )
    for axes, (field, title, unit, ideal, scale) in zip(panels, PANELS, strict=True):
        for i, (planner, colour) in enumerate(COLOURS.items()):
            values = [(found[case][planner][field] - ideal) * scale for case in cases]
            at = [place + (i - 0.5) * 0.38 for place in range(len(cases))]
            bars = axes.barh(at, values, 0.38, label=planner, color=colour)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit, fontsize=8)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].invert_yaxis()
    panels[0].legend(loc="lower right", fontsize=8)
    save(figure, path)
