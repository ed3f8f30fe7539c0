"""How `simcore validate against` shows what it found: tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from simcore.experiments.against_metrics import LATENCIES, SPLIT, Binned, Change, Row

if TYPE_CHECKING:
    from simcore.experiments.against import Checked

NO_FIT = "No parameter was fitted here; the verdict is about this load on this server, and no other."
POINTS = 99  # quantiles of the picture


def _value(value: float, unit: str) -> str:
    if value != value:
        return "-"
    return f"{value:,.2f}" if unit == "ms" else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _share(value: float, sign: bool = False) -> str:
    return "-" if value != value else f"{value:+.1%}" if sign else f"{value:.1%}"


def _name(row: Row | Change) -> str:
    unit = f" ({row.unit})" if row.unit else ""
    return f"{row.label} {row.statistic}".strip() + unit


def _headings(found: Checked) -> list[str]:
    again = [f"measured {k + 1}" for k in range(len(found.paths))] if len(found.paths) > 1 else ["measured"]
    between = ["between seeds"] if len(found.seeds) > 1 else []
    return ["", *again, "simulated", "error", "spread", *between, "error within spread"]


def _table(title: str, found: Checked, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in _headings(found):
        table.add_column(heading, justify="left" if heading in ("", "error within spread") else "right")
    for row in rows:
        table.add_row(*_cells(row, len(found.seeds) > 1))
    return table


def _cells(row: Row, seeds: bool) -> list[str]:
    within = {None: "", True: "yes", False: "no"}[row.within]
    if row.bucket is not None:
        within = f"same bucket, {row.bucket[0]:g} to {row.bucket[1]:g} {row.unit}"
    found = [_value(v, row.unit) for v in (*row.measured, float(np.mean(row.simulated)))]
    between = [_share(row.seeds)] if seeds else []
    return [_name(row), *found, _share(row.error, sign=True), _share(row.spread), *between, within]


def print_checked(console: Console, title: str, found: Checked) -> None:
    """Tables of figures and of the split, what was assumed, and the verdict."""
    console.print(_table(f"simcore validate against | {title}", found, [*found.rows, *found.numbers]))
    console.print(f"Spread: {found.spread}."
                  + (" Requests share a queue, so a second run may be further off." if "requests" in found.spread else ""),
                  highlight=False, soft_wrap=True)
    _print_split(console, found)
    console.print("Assumed and said:", style="bold")
    for line in (found.says, *found.notes, "the client, the network and the API server are not simulated"):
        console.print(f"  {line}", highlight=False, markup=False, style="dim", soft_wrap=True)
    console.print(verdict(found), highlight=False, soft_wrap=True)


def _print_split(console: Console, found: Checked) -> None:
    if found.split:
        console.print(_table("Where a request's time goes (mean)", found, found.split))
    parts = [f"{SPLIT[key]} {1e3 * value:,.2f} ms" for key, value in found.simulated_split.items()]
    kind = "simulated too" if found.split else "SIMULATED ONLY, the file has no such split"
    console.print(f"Split of the mean ({kind}): {', '.join(parts)} (part of prefill or decode).", highlight=False,
                  soft_wrap=True)


def verdict(found: Checked) -> str:
    """One careful sentence or two."""
    inside, known = found.within
    rows = [row for row in found.rows if row.error == row.error]
    bucket = " (or in the same bucket of the server's histogram)" if any(row.bucket for row in found.rows) else ""
    text = f"{inside} of {known} latency figures are within the spread{bucket}. " if known else ""
    if rows:
        worst = max(rows, key=lambda row: abs(row.error))
        middle = float(np.median([abs(row.error) for row in rows]))
        text += f"Median error {middle:.1%}, largest {abs(worst.error):.1%} ({_name(worst)}). "
    return text + NO_FIT


def print_changes(console: Console, found: Sequence[Change]) -> None:
    table = Table(title="The change: measured and predicted", title_justify="left")
    for heading in ("", "before", "after", "measured change", "predicted change", "spread", "sign", "size within spread"):
        table.add_column(heading, justify="left" if heading in ("", "sign", "size within spread") else "right")
    for c in found:
        size = {None: "", True: "yes", False: "no"}[c.size]
        table.add_row(_name(c), _value(c.before, c.unit), _value(c.after, c.unit), _share(c.measured, sign=True),
                      _share(c.predicted, sign=True), _share(c.spread), c.sign, size)
    console.print(table)
    console.print(verdict_of_changes(found), highlight=False, soft_wrap=True)


def verdict_of_changes(found: Sequence[Change]) -> str:
    latencies = [c for c in found if c.metric in LATENCIES]
    signs = [c.sign for c in latencies]
    judged = signs.count("agrees") + signs.count("contradicts")
    sizes = [c.size for c in latencies if c.size is not None]
    return (f"Of {len(latencies)} latency figures {judged} changed by more than their spread; the predicted sign agrees in "
            f"{signs.count('agrees')} and contradicts in {signs.count('contradicts')}. The predicted size is within the "
            f"spread of the measured change in {sum(sizes)} of {len(sizes)}. {NO_FIT}")


def as_json(name: str, checked: Checked, other: Checked | None, found: Sequence[Change]) -> dict[str, Any]:
    what = {"what": "a simulation beside measured runs", "study": name}
    if other is None:
        return {**what, **checked.as_json(), "verdict": verdict(checked)}
    return {**what, "before": checked.as_json(), "after": other.as_json(), "changes": [vars(c) for c in found],
            "verdict": verdict_of_changes(found)}


def draw(path: Path, title: str, found: Mapping[str, Checked]) -> None:
    """Simulated over measured quantiles of each latency (PNG); between the dashed lines the error is below 10%."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [key for key in LATENCIES if any(any(row.metric == key for row in c.rows) for c in found.values())]
    columns = max(len(shown), 1)
    figure, axes = plt.subplots(1, columns, figsize=(3.9 * columns, 4.2), layout="constrained", squeeze=False)
    figure.suptitle(f"{title}: simulated beside measured, quantiles 1% to 99%")
    shares = np.linspace(0.01, 0.99, POINTS)
    for axis, key in zip(axes[0], shown, strict=False):
        seen: list[float] = []
        for name, checked in found.items():
            for number, (measured, seeds) in enumerate(zip(checked.measured, checked.simulated, strict=True)):
                x = np.array([1e3 * measured.spreads[key].quantile(q) for q in shares])
                y = np.mean([[1e3 * s.spreads[key].quantile(q) for q in shares] for s in seeds], axis=0)
                label = " ".join(filter(None, (name, f"file {number + 1}" if len(checked.paths) > 1 else "")))
                axis.plot(x, y, ".", markersize=4, label=label or None)
                good = (x > 0) & (y > 0)
                seen += [*x[good], *y[good]]
        if seen:
            ends = np.array([min(seen), max(seen)])
            axis.plot(ends, ends, color="grey", linewidth=0.8)
            for factor in (0.9, 1.1):
                axis.plot(ends, factor * ends, color="grey", linewidth=0.6, linestyle="--")
            axis.set(xscale="log", yscale="log")
        binned = any(isinstance(m.spreads.get(key), Binned) for c in found.values() for m in c.measured)
        axis.set(title=LATENCIES[key] + (" (through buckets)" if binned else ""), xlabel="measured (ms)",
                 ylabel="simulated (ms)")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
