"""What `simcore validate` and `simcore calibrate` do."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simcore.errors import ConfigError
from simcore.experiments.calibrate import fit
from simcore.experiments.live_validation import LiveValidation, Row, validate_live
from simcore.experiments.pages import fill_page, read_page
from simcore.experiments.run import build_cost, build_deployment, study_llm
from simcore.experiments.study import read_study
from simcore.experiments.terminal import progress_bar, write_json
from simcore.files import to_json, whole_folder, write_whole
from simcore.models.calibrated import CalibratedModel, read_calibrated
from simcore.models.hf_config import load_llm
from simcore.models.kv_capacity import MemoryAssumptions
from simcore.models.operator_profile import read_profile

STUDIES = Path(__file__).parent / "live"
DRIFT = 0.05  # of the machine since its profile: beyond it the report says so


def run_live(
    device: str, study: Path | None, settings: list[str], profile: Path | None, load: float, out: Path | None,
    page: Path | None, json: Path | None, console: Console,
) -> None:
    """`simcore validate live`."""
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", found=device, allowed="cpu, cuda")
    if not 0 < load < 1:
        raise ConfigError("--load", found=load, allowed="above 0 and below 1")
    file = read_study(study or STUDIES / f"{device}.yaml", settings)
    before = read_page(page, file.study.name) if page else ""
    measured = profile or Path("out") / f"profile-{file.study.llm.name.replace('/', '-')}-{device}.json"
    target = out or Path("out") / file.study.name
    with whole_folder(target) as folder:
        with progress_bar(console) as bar:
            tasks: dict[str, Any] = {}

            def report(what: str, share: float) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=1.0)
                bar.update(tasks[what], completed=share)

            found = validate_live(file, device, measured, load=load, seed=file.study.seeds[0], report=report)
        write_whole(folder / "cost_model.json", found.model.model_dump_json(indent=1) + "\n")
        write_whole(folder / "live.json", to_json(found.as_json()))
        draw_live(folder / "live.png", found)
    print_live(console, found)
    console.print(f"Written to {target}: live.json, live.png, cost_model.json; operators in {measured}", highlight=False)
    if page:
        fill_page(page, file.study.name, before, live_markdown(found))
    write_json(json, found.as_json())


def _cells(row: Row) -> list[str]:
    unit = 1e3
    again = "" if row.repeated != row.repeated else f"{row.repeated * unit:,.2f}"
    target = "" if row.ok is None else f"{row.target:.0%}, {'met' if row.ok else 'missed'}"
    return [row.metric, f"{row.measured * unit:,.2f}", again, f"{row.predicted * unit:,.2f}", f"{row.error:.1%}",
            "" if row.spread != row.spread else f"{row.spread:.1%}", target]


_HEADINGS = ("", "measured (ms)", "again (ms)", "predicted (ms)", "error", "between the two runs", "target")


def _about(found: LiveValidation) -> list[str]:
    f = found.facts()
    return [
        "The engine against its model on one machine: no word about any other.",
        f"{f['model']} ({f['parameters'] / 1e6:,.1f} million parameters, {f['dtype']}) on {f['device']}, {f['software']}.",
        f"Fitted on {f['fit_rows']:.0f} batches made up (median error {f['fit_median_error']:.1%}); "
        f"{f['fit_held_out_rows']:.0f} others, drawn, {f['fit_held_out_median_error']:.1%}. Judged on {f['steps']:,} steps "
        f"of {f['requests']} requests, none of them fitted; {f['paired_steps']:,} steps of the second run had a batch of "
        "the first.",
        f"Just before the runs, batches of the profile took x {f['drift']:.2f} of what they took when it was measured"
        + (": measure anew (another --profile) before you read more into this." if abs(f["drift"] - 1) > DRIFT else "."),
    ]


def print_live(console: Console, found: LiveValidation) -> None:
    """The report: what was measured, predicted, and how far the two real runs are apart."""
    table = Table(title="simcore validate live", title_justify="left")
    for name in _HEADINGS:
        table.add_column(name, justify="right" if name else "left")
    for row in found.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for line in _about(found):
        console.print(line, highlight=False, soft_wrap=True)


def live_markdown(found: LiveValidation) -> str:
    """The report for a page of the docs."""
    lines = [f"| {' | '.join(_HEADINGS)} |", "|" + " --- |" * len(_HEADINGS)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in found.rows]
    return "\n".join([*lines, "", " ".join(_about(found))]) + "\n"


def draw_live(path: Path, found: LiveValidation) -> None:
    """Predicted over measured: steps, and requests' TTFT and TPOT (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plot, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    real, simulated = found.measured[0].requests, found.simulated.requests
    pairs: list[tuple[str, Any, Any]] = [
        ("steps", [step.seconds for step in found.steps], found.predicted),
        ("TTFT of requests", real["ttft"], simulated["ttft"]), ("TPOT of requests", real["tpot"], simulated["tpot"]),
    ]
    for axis, (title, measured, predicted) in zip(axes, pairs, strict=True):
        x, y = [1e3 * float(v) for v in measured], [1e3 * float(v) for v in predicted]
        axis.plot(x, y, ".", markersize=3, alpha=0.5)
        ends = [min(v for v in (*x, *y) if v > 0), max(v for v in (*x, *y) if v > 0)]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="measured (ms)", ylabel="predicted (ms)", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    plot.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(plot)


# --- calibrate -------------------------------------------------------------------------------------------------------


def run_calibrate(source: Path, model: str | None, out: Path | None, *, show: bool, console: Console) -> None:
    """`simcore calibrate`: a profile becomes a cost model; or with `show` the constants of a profile's fit, of a cost model
    or of a study are listed."""
    if source.suffix in (".yaml", ".yml"):
        if not show:
            raise ConfigError(str(source), allowed="a profile (.json); a study only with --show")
        _show_study(source, console)
        return
    fitted = _read_or_fit(source, model)
    if show:
        _show(console, fitted.listed(), f"fitted on {fitted.device}: " + _fitted_on(fitted))
    else:
        target = out or source.with_name(f"{source.stem}.cost_model.json")
        write_whole(target, fitted.model_dump_json(indent=1) + "\n")
        console.print(f"{_fitted_on(fitted)}\nWritten to {target}; a study names it by cost_model: "
                      f"{{kind: calibrated, file: {target}}}", highlight=False, soft_wrap=True)


def _read_or_fit(source: Path, model: str | None) -> CalibratedModel:
    try:
        kind = str(jsonlib.loads(source.read_text(encoding="utf-8")).get("format", ""))
    except OSError as error:
        raise ConfigError(str(source), why=f"cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError):
        kind = ""
    if kind.startswith("simcore cost model"):
        return read_calibrated(source)
    profile = read_profile(source)
    return fit(profile, load_llm(model or profile.model))


def _fitted_on(fitted: CalibratedModel) -> str:
    return f"{fitted.model}: " + ", ".join(f"{name} {value:.4g}" for name, value in fitted.fitted_on.items())


def _show_study(path: Path, console: Console) -> None:
    file = read_study(path)
    cost = build_cost(file.study, file.folder, study_llm(file.study))
    _, capacity = build_deployment(file.study, file.folder)
    listed = dict(cost.listed)
    if capacity.estimated:
        listed |= {f"memory.{name}": float(value) for name, value in asdict(MemoryAssumptions()).items()}
    _show(console, listed, cost.says.split(":")[0] + (": assumed" if "assumed" in cost.says else ": fitted"))


def _show(console: Console, listed: dict[str, float], what: str) -> None:
    console.print(f"Neither a specification nor read from a table ({what}):", highlight=False, soft_wrap=True)
    width = max(map(len, listed))
    for name, value in listed.items():
        console.print(f"  {name:{width}}  {value:.6g}", highlight=False)
