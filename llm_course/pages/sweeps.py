"""What the page on sweeps draws: a recorded sweep as a map."""

import matplotlib.pyplot as plt
import numpy as np

from llm_course.pages.scaling import rate_curves


def show_sweep(optimizer: str, task: str) -> None:
    """A recorded sweep: the loss of each learning rate and width, and the best rate of each."""
    curves = {width: dict(curve) for width, curve in rate_curves(optimizer, task).items()}
    rates = sorted({rate for curve in curves.values() for rate in curve})
    losses = np.array([[curve.get(rate, np.nan) for rate in rates] for curve in curves.values()])
    _, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    axes.imshow(losses, aspect="auto", cmap="viridis_r", vmax=np.nanquantile(losses, 0.9))
    for i, row in enumerate(losses):
        for j, loss in enumerate(row):
            best = loss == np.nanmin(row)
            axes.text(
                j,
                i,
                "" if np.isnan(loss) else f"{loss:.2f}" + (" *" if best else ""),
                ha="center",
                va="center",
                color="black" if loss < np.nanmedian(losses) else "white",
                fontweight="bold" if best else "normal",
            )
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(curves)), [str(width) for width in curves])
    axes.set(xlabel="learning rate", ylabel="width", title="Validation loss; * best of its row")
    plt.show()
