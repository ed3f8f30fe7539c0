"""The console command `simcore`. Heavy imports stand inside the commands, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from simcore.errors import SimcoreError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Discrete-event simulation of LLM serving: replay traces, compare policies, know how sure you are.")
trace_app = typer.Typer(no_args_is_help=True, help="Look at traces, cut and convert them.")
app.add_typer(trace_app, name="trace")
config_app = typer.Typer(no_args_is_help=True, help="Make studies from what you have.")
app.add_typer(config_app, name="config")
validate_app = typer.Typer(no_args_is_help=True, help="Lay predictions beside measurements.")
app.add_typer(validate_app, name="validate")

StudyPath = Annotated[Path, typer.Argument(help="A study file (YAML).", show_default=False)]
Set = Annotated[Optional[list[str]], typer.Option("--set", help="Override a key: --set cluster.replicas=4")]  # noqa: UP045
Goodput = Annotated[Optional[list[str]], typer.Option(help="SLO in ms: --goodput 'ttft:500 tpot:50'")]  # noqa: UP045
Out = Annotated[Optional[Path], typer.Option(help="Result folder [default: out/<study name>]")]  # noqa: UP045
Json = Annotated[Optional[Path], typer.Option("--json", help="Also write the summary as JSON here; - is stdout.")]  # noqa: UP045
Detailed = Annotated[bool, typer.Option("--save-detailed", help="Per-request lists in summary.json, as vllm bench serve.")]
Csv = Annotated[bool, typer.Option("--csv", help="Tables as CSV instead of Parquet.")]
Skip = Annotated[bool, typer.Option("--skip-bad", help="Leave out bad rows, count and list them.")]
Format = Annotated[Optional[str], typer.Option(help="The trace's format [default: from the content].")]  # noqa: UP045


@app.command()
def run(
    study: StudyPath, set: Set = None, goodput: Goodput = None, out: Out = None, json: Json = None,
    arm: Annotated[Optional[str], typer.Option(help="One arm of compare.vary, by its label.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="[default: the study's first]")] = None,  # noqa: UP045
    save_detailed: Detailed = False, csv: Csv = False,
) -> None:
    """Play a study's workload once and write its tables."""
    from simcore.experiments.commands import run_study

    run_study(study, set or [], goodput or [], out, json, arm, seed, detailed=save_detailed, csv=csv)


@app.command()
def compare(
    study: StudyPath, set: Set = None, vary: Annotated[Optional[list[str]], typer.Option(  # noqa: UP045
        help="Arms: --vary policies.replica_routing=round-robin,least-loaded (replaces the file's)")] = None,
    goodput: Goodput = None, out: Out = None, json: Json = None, save_detailed: Detailed = False, csv: Csv = False,
    processes: Annotated[Optional[int], typer.Option(min=1, help="[default: one a core]")] = None,  # noqa: UP045
) -> None:
    """Play every arm of a study and say which is better, and how sure that is."""
    from simcore.experiments.commands import compare_study

    compare_study(study, set or [], vary or [], goodput or [], out, json, processes, detailed=save_detailed, csv=csv)


@app.command()
def sweep(
    study: StudyPath, set: Set = None, vary: Annotated[Optional[list[str]], typer.Option(  # noqa: UP045
        help="Axes: --vary workload.generate.rate=1,2,4 (replaces the file's compare.vary)")] = None,
    seeds: Annotated[Optional[str], typer.Option(help="--seeds 1,2,3 (replaces the file's)")] = None,  # noqa: UP045
    goodput: Goodput = None, out: Annotated[
        Optional[Path], typer.Option(help="Sweep folder [default: out/<study name>-sweep]")] = None,  # noqa: UP045
    json: Json = None, tables: Annotated[bool, typer.Option("--tables", help="Keep each run's Parquet tables.")] = False,
    processes: Annotated[Optional[int], typer.Option(min=1, help="[default: one a core]")] = None,  # noqa: UP045
) -> None:
    """Play every combination of the axes under every seed; started again, only what is missing."""
    from simcore.experiments.commands import sweep_study

    sweep_study(study, set or [], vary or [], seeds, goodput or [], out, json, processes, tables=tables)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="Whose claims: the name of a folder of experiments, e.g. continuum.")],
    figure: Annotated[Optional[int], typer.Option(help="The points of this figure instead of the claims.")] = None,  # noqa: UP045
    csv: Annotated[Optional[Path], typer.Option(help="Folder for the figure's points (CSV) and picture (PNG).")] = None,  # noqa: UP045
    claims: Annotated[Optional[str], typer.Option(help="--claims b,c [default: all]")] = None,  # noqa: UP045
    json: Json = None,
    processes: Annotated[Optional[int], typer.Option(min=1, help="[default: one a core]")] = None,  # noqa: UP045
    page: Annotated[Optional[Path], typer.Option(help="Put the verdicts between the marks of this page.")] = None,  # noqa: UP045
) -> None:
    """Run the claims of a paper and say which hold, beside their nulls and over their readings."""
    from simcore.experiments.commands import reproduce_paper

    reproduce_paper(paper, figure, csv, claims, json, processes, page)


@app.command()
def capacity(
    study: StudyPath, set: Set = None, goodput: Goodput = None,
    percentile: Annotated[float, typer.Option(help="Share of the requests (%) that must be within all limits.")] = 95.0,
    find: Annotated[str, typer.Option(help="replicas (the fewest), rate (the highest) or gpus (the fewest, over --tp).")]
    = "replicas",
    seeds: Annotated[Optional[str], typer.Option(help="--seeds 1,2,3 (replaces the file's)")] = None,  # noqa: UP045
    arm: Annotated[Optional[str], typer.Option(help="One arm of compare.vary, by its label.")] = None,  # noqa: UP045
    tp: Annotated[Optional[str], typer.Option(help="Tensor-parallel sizes of --find gpus [default: 1,2,4,8]")] = None,  # noqa: UP045
    most: Annotated[int, typer.Option(min=1, help="Replicas, or GPUs, tried at most.")] = 256,
    precision: Annotated[float, typer.Option(help="Step between two rates, as a share.")] = 0.05,
    users: Annotated[Optional[float], typer.Option(help="Users, for the price of one [default: sessions an hour]")] = None,  # noqa: UP045
    headroom: Annotated[bool, typer.Option(help="Also find how much more load the answer carries.")] = True,
    out: Annotated[Optional[Path], typer.Option(help="Folder [default: out/<study name>-capacity]")] = None,  # noqa: UP045
    json: Json = None,
    processes: Annotated[Optional[int], typer.Option(min=1, help="[default: one a core]")] = None,  # noqa: UP045
) -> None:
    """Find the fewest replicas or GPUs, or the highest rate, that meets an SLO; started again, it goes on."""
    from simcore.experiments.capacity import run_capacity

    run_capacity(
        study, set or [], goodput or [], percentile=percentile, find=find, seeds=seeds, arm=arm, sizes=tp, most=most,
        precision=precision, users=users, with_headroom=headroom, out=out, json=json, processes=processes)


@app.command()
def pareto(
    study: StudyPath, set: Set = None, vary: Annotated[Optional[list[str]], typer.Option(  # noqa: UP045
        help="Axes: --vary cluster.replicas=1,2,4 (replaces the file's compare.vary)")] = None,
    goodput: Goodput = None,
    seeds: Annotated[Optional[str], typer.Option(help="--seeds 1,2,3 (replaces the file's)")] = None,  # noqa: UP045
    price: Annotated[Optional[list[str]], typer.Option(  # noqa: UP045
        help="$ per GPU-hour by GPU: --price h100-sxm=2.5,a100-80gb-sxm=1.5 [default: cost.usd_per_gpu_hour]")] = None,
    out: Annotated[Optional[Path], typer.Option(help="Folder [default: out/<study name>-pareto]")] = None,  # noqa: UP045
    json: Json = None,
    processes: Annotated[Optional[int], typer.Option(min=1, help="[default: one a core]")] = None,  # noqa: UP045
) -> None:
    """Cost against goodput, TTFT p95 and throughput over the axes: what is not dominated, and how sure that is."""
    from simcore.experiments.pareto import run_pareto

    run_pareto(study, set or [], vary or [], goodput or [], seeds=seeds, prices=price, out=out, json=json,
               processes=processes)


@app.command()
def timeline(
    study: StudyPath, set: Set = None,
    start: Annotated[Optional[str], typer.Option(help="e.g. 10min [default: the first arrival]")] = None,  # noqa: UP045
    end: Annotated[Optional[str], typer.Option(help="[default: a minute later]")] = None,  # noqa: UP045
    arm: Annotated[Optional[str], typer.Option(help="One arm of compare.vary, by its label.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="[default: the study's first]")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="[default: out/<study name>-timeline.json]")] = None,  # noqa: UP045
) -> None:
    """Write a window of a run as a trace for Perfetto."""
    from simcore.experiments.timeline import run_timeline

    done = run_timeline(study, set or [], arm, seed, start, end, out)
    print(f"{done.events:,} events, {done.start:g} .. {done.end:g} s, written to {done.path}")
    for note in done.notes:
        print(note)


@app.command("map")
def winner_map(
    sweep: Annotated[Path, typer.Argument(help="The folder of a finished simcore sweep.")],
    x: Annotated[str, typer.Option(help="An axis of the sweep, e.g. workload.start.rate.")],
    y: Annotated[str, typer.Option(help="Another axis, e.g. engine.kv_offloading_size.")],
    metric: Annotated[str, typer.Option(help="What decides, e.g. jct_mean or ttft_p99.")] = "jct_mean",
    json: Json = None,
) -> None:
    """Which policy wins where, over two axes of a sweep."""
    from simcore.experiments.commands import map_sweep

    map_sweep(sweep, x, y, metric, json)


@app.command()
def policies(
    kind: Annotated[Optional[str], typer.Argument(help="One decision point, e.g. replica_routing.")] = None,  # noqa: UP045
    json: Json = None,
) -> None:
    """List the decision points and the policies that can be named in a study."""
    from simcore.experiments.commands import list_policies

    list_policies(kind, json)


@app.command()
def bench(
    workloads: Annotated[str, typer.Option(help="W1-N-O, W2-N, W4, W4-16, with commas; N such as 500 or 10k.")]
    = "W1-10k-128,W2-10k,W4",
    repeat: Annotated[int, typer.Option(min=1, help="The least CPU time of so many runs counts.")] = 3,
    path: Annotated[str, typer.Option(help="planned or step-by-step; both give the same results.")] = "planned",
    export: Annotated[Optional[Path], typer.Option(help="Write the workloads for other simulators here.")] = None,  # noqa: UP045
    dynosim: Annotated[Optional[Path], typer.Option(help="A Python with ai-dynamo: run that peer too.")] = None,  # noqa: UP045
    page: Annotated[Optional[Path], typer.Option(help="Put the table between the marks of this page.")] = None,  # noqa: UP045
    json: Json = None,
) -> None:
    """Measure the speed of the simulator itself (docs/speed.md)."""
    from simcore.experiments.bench import run_bench

    run_bench(workloads, repeat=repeat, path=path, export=export, dynosim=dynosim, page=page, json=json)


@validate_app.command("live")
def validate_live(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    study: Annotated[Optional[Path], typer.Option(help="[default: experiments/live/DEVICE.yaml]")] = None,  # noqa: UP045
    set: Set = None,
    profile: Annotated[Optional[Path], typer.Option(help="Measured operators; begun, or gone on with.")] = None,  # noqa: UP045
    load: Annotated[float, typer.Option(help="Share of what the device can serve, by the fitted model.")] = 0.6,
    out: Out = None, json: Json = None,
    page: Annotated[Optional[Path], typer.Option(help="Put the table between the marks of this page.")] = None,  # noqa: UP045
) -> None:
    """Run a workload on a real model on this machine and beside it in simulation (needs the extra `kernels`)."""
    from simcore.experiments.terminal import console_of
    from simcore.experiments.validation import run_live

    run_live(device, study, set or [], profile, load, out, page, json, console_of(json))


@validate_app.command("against")
def validate_against(
    study: Annotated[Path, typer.Option("--study", help="The study of the server (YAML).", show_default=False)],
    files: Annotated[Optional[list[Path]], typer.Argument(  # noqa: UP045
        help="vllm bench serve JSON, CSV of requests or Prometheus dump; several are repeats.", show_default=False)] = None,
    before: Annotated[Optional[list[Path]], typer.Option(help="Measured before a change; again for repeats.")] = None,  # noqa: UP045
    after: Annotated[Optional[list[Path]], typer.Option(help="Measured after it.")] = None,  # noqa: UP045
    after_study: Annotated[Optional[Path], typer.Option(help="The study after the change.")] = None,  # noqa: UP045
    set_after: Annotated[Optional[list[str]], typer.Option(help="What the change is: --set-after key=value.")] = None,  # noqa: UP045
    set: Set = None,
    seeds: Annotated[Optional[str], typer.Option(help="--seeds 1,2,3, where arrivals are drawn.")] = None,  # noqa: UP045
    arrivals: Annotated[str, typer.Option(help="auto, recorded, process or clients.")] = "auto",
    workload: Annotated[str, typer.Option(help="Token identity: auto, file (none) or study.")] = "auto",
    match: Annotated[Optional[list[str]], typer.Option(help="Series of a dump: --match model_name=...")] = None,  # noqa: UP045
    out: Out = None, json: Json = None,
) -> None:
    """Simulate the workload of a measured run and lay it beside the run; nothing is fitted."""
    from simcore.experiments.against import run_against

    run_against(files or [], study, set or [], before=before or [], after=after or [], after_study=after_study,
                set_after=set_after or [], seeds=seeds, arrivals=arrivals, workload=workload, match=match or [], out=out,
                json=json)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="A profile of validate live; with --show also a cost model or study.")],
    out: Annotated[Optional[Path], typer.Option(help="The cost model [default: beside the profile]")] = None,  # noqa: UP045
    model: Annotated[Optional[str], typer.Option(help="Its LLM, if the profile's name is no preset.")] = None,  # noqa: UP045
    show: Annotated[bool, typer.Option("--show", help="List every constant that is no specification, and write nothing.")]
    = False,
) -> None:
    """Fit a cost model to a profile, or list the constants of one."""
    from simcore.experiments.terminal import console_of
    from simcore.experiments.validation import run_calibrate

    run_calibrate(file, model, out, show=show, console=console_of(None))


@config_app.command("from-vllm")
def config_from_vllm(
    source: Annotated[Optional[str], typer.Argument(  # noqa: UP045
        help="A vllm serve command in quotes, a file with one, or a start-up log.")] = None,
    log: Annotated[Optional[Path], typer.Option(help="A start-up log: its KV size wins over the estimate.")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="The study [default: stdout]")] = None,  # noqa: UP045
    gpu: Annotated[Optional[str], typer.Option(help="A preset or a YAML file [default: as the log names it]")] = None,  # noqa: UP045
    model_config: Annotated[Optional[Path], typer.Option(help="config.json of the model, or its folder.")] = None,  # noqa: UP045
    vllm_version: Annotated[Optional[str], typer.Option(help="[default: of the log or image, else the newest]")] = None,  # noqa: UP045
    trace: Annotated[Optional[str], typer.Option(help="Your requests [default: Poisson arrivals]")] = None,  # noqa: UP045
    rate: Annotated[float, typer.Option(help="Requests/s of the placeholder.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Of the placeholder.")] = 500,
    replicas: Annotated[int, typer.Option(min=1, help="Servers like this one.")] = 1,
    skip_unknown: Annotated[bool, typer.Option("--skip-unknown", help="List unknown flags instead of refusing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing study.")] = False, json: Json = None,
) -> None:
    """Turn a vLLM server into a study that says where each value came from."""
    from simcore.experiments.from_vllm import run_from_vllm

    run_from_vllm(source, log=log, out=out, gpu=gpu, model_config=model_config, vllm_version=vllm_version, trace=trace,
                  rate=rate, requests=requests, replicas=replicas, skip_unknown=skip_unknown, force=force, json=json)


@trace_app.command("info")
def trace_info(
    trace: Annotated[str, typer.Argument(help="A shipped trace's name, or a file.")], format: Format = None,
    block_size: Annotated[int, typer.Option(min=1, help="Engine block of the best possible hit rate.")] = 16,
    skip_bad: Skip = False, json: Json = None,
) -> None:
    """Counts, rates, quantiles, best possible hit rate, and what was understood."""
    from simcore.experiments.commands import describe_trace

    describe_trace(trace, format, block_size, json, skip_bad=skip_bad)


@trace_app.command("cut")
def trace_cut(
    trace: Annotated[str, typer.Argument(help="A shipped trace's name, or a file.")],
    output: Annotated[Path, typer.Argument(help="File to write: .jsonl(.gz) keeps token identity, .csv(.gz) does not.")],
    format: Format = None,
    start: Annotated[str, typer.Option(help="Keep arrivals from this time on (e.g. 10min).")] = "0s",
    end: Annotated[Optional[str], typer.Option(help="... to this time.")] = None,  # noqa: UP045
    thin: Annotated[Optional[float], typer.Option(help="Share of the sessions to keep.")] = None,  # noqa: UP045
    clone: Annotated[Optional[float], typer.Option(help="Raise the rate so many times by cloning sessions.")] = None,  # noqa: UP045
    head: Annotated[Optional[int], typer.Option(min=1, help="Keep the first requests.")] = None,  # noqa: UP045
    dequantise: Annotated[Optional[str], typer.Option(help="Spread arrivals over ticks of this length.")] = None,  # noqa: UP045
    seed: int = 1, skip_bad: Skip = False, json: Json = None,
) -> None:
    """Slice by time, thin or clone by sessions, take the head; write our CSV or JSONL."""
    from simcore.experiments.commands import cut_trace

    cut_trace(trace, output, format, start, end, thin, clone, head, dequantise, seed, json, skip_bad=skip_bad)


@trace_app.command("import")
def trace_import(
    source: Annotated[str, typer.Argument(help="A log or trace; of some formats a folder.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Our JSONL: .jsonl or .jsonl.gz.", show_default=False)],
    format: Format = None,
    set: Annotated[Optional[list[str]], typer.Option("--set", help="Option of the format: --set clock=recorded")] = None,  # noqa: UP045
    salt: Annotated[Optional[str], typer.Option(help="Of the digests that compare texts [default: random]")] = None,  # noqa: UP045
    block_size: Annotated[int, typer.Option(min=1, help="Engine block of the best possible hit rate.")] = 16,
    json: Json = None, skip_bad: Skip = False,
) -> None:
    """Turn a gateway's log, spans or another tool's trace into ours; text is counted and compared here, never written."""
    from simcore.experiments.trace_files import run_trace_import

    run_trace_import(source, target, format=format, settings=set or [], salt=salt, block_size=block_size, json=json,
                     skip_bad=skip_bad)


@trace_app.command("export")
def trace_export(
    trace: Annotated[str, typer.Argument(help="A shipped trace's name, or a file.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="What to write; .gz is compressed.", show_default=False)],
    to: Annotated[str, typer.Option(help="mooncake, agentic-mooncake, vidur or csv.", show_default=False)],
    format: Format = None,
    set: Annotated[Optional[list[str]], typer.Option("--set", help="Option of the format: --set clock=recorded")] = None,  # noqa: UP045
    block_tokens: Annotated[Optional[int], typer.Option(min=1, help="A divisor of the trace's [default: its own]")] = None,  # noqa: UP045
    json: Json = None, skip_bad: Skip = False,
) -> None:
    """Write a trace in another tool's format, and say what that format does not carry."""
    from simcore.experiments.trace_files import run_trace_export

    run_trace_export(trace, target, to=to, format=format, settings=set or [], block_tokens=block_tokens, json=json,
                     skip_bad=skip_bad)


def _version(value: bool) -> None:
    if value:
        import simcore

        typer.echo(f"simcore {simcore.__version__}")
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: an error of ours is one line on stderr and exit code 2; Ctrl-C is 130."""
    try:
        app(args=arguments)
    except (SimcoreError, OSError) as error:  # an OSError is a folder that cannot be written, a full disk
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
