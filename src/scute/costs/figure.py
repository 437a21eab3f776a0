"""A prediction as a figure: the time that each arm adds to a step, by term."""

from pathlib import Path

from scute.costs.prediction import Prediction
from scute.costs.traffic import Route

TERMS = (*map(str, Route), "launches")
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#bbbbbb", "#ee6677")


def draw(prediction: Prediction, path: Path) -> None:
    """Write it to `path`, in the format that its suffix names. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("decode", "prefill") if getattr(prediction.arms[0], kind) is not None]
    height = 1.2 + 0.4 * len(prediction.arms) * len(kinds)
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.subplots(len(kinds), squeeze=False)[:, 0]
    for axis, kind in zip(axes, kinds, strict=True):
        steps = {arm.name: getattr(arm, kind) for arm in reversed(prediction.arms)}
        done = [0.0] * len(steps)
        for term, colour in zip(TERMS, COLOURS, strict=True):
            widths = [step.ms.get(term, 0.0) for step in steps.values()]
            axis.barh(list(steps), widths, left=done, color=colour, label=term)
            done = [left + width for left, width in zip(done, widths, strict=True)]
        axis.set_xlabel(f"ms added to a {kind} step of {getattr(prediction.arms[0], kind).rows} rows")
    axes[0].set_title(f"{prediction.tenants} adapters on {prediction.base}, {prediction.device}, predicted", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=7, ncols=len(TERMS))
    figure.savefig(path)
