"""The commands and their options.

Each body imports the modules that it needs: ``--help`` loads no planner, and ``plan`` no torch.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from lightning_hetero.cli import options as o
from lightning_hetero.cli.output import print_json
from lightning_hetero.cli.planning import DEFAULT, described
from lightning_hetero.cli.words import epilog
from lightning_hetero.errors import (
    ConfigError,
    HeteroError,
    OutOfMemoryBudgetError,
    PlanError,
    UnsupportedError,
    did_you_mean,
)

OK, PROBLEM, IMPOSSIBLE = 0, 1, 2
_IMPOSSIBLE = (ConfigError, PlanError, OutOfMemoryBudgetError, UnsupportedError)


class Commands(TyperGroup):
    """Turns errors into exit codes, and into JSON with ``--json``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command and exits. Without ``standalone_mode`` returns or raises instead."""
        given = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
        sys.exit(self._code(given, prog_name))

    def _code(self, args: list[str], prog_name: str | None) -> int:
        as_json = "--json" in args
        try:
            result = super().main(args, prog_name, standalone_mode=False)
            return result if isinstance(result, int) else OK
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            hint = f"\nTry '{context.command_path} --help'." if context else ""
            return _fail({"error": _said(error)}, IMPOSSIBLE, as_json=as_json, hint=hint)
        except _IMPOSSIBLE as error:
            return _fail(described(error), IMPOSSIBLE, as_json=as_json)
        except HeteroError as error:
            return _fail(described(error), PROBLEM, as_json=as_json)
        except Exception as error:
            traceback.print_exc()  # a bug, ours or the machine's: show where
            return _fail({"error": f"{type(error).__name__}: {error}"}, PROBLEM, as_json=as_json)


class UpToScript(TyperCommand):
    """A command whose options end at the second word that is none of them: the training script.

    What follows belongs to the script, even if it is spelled like an option of this command.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts ``--`` before the script."""
        takes_value = {name: not getattr(p, "is_flag", True) for p in self.get_params(ctx) for name in p.opts if name[:1] == "-"}
        words, index = 0, 0
        while index < len(args) and args[index] != "--":
            name, equals, _ = args[index].partition("=")
            if name in takes_value:
                index += 2 if takes_value[name] and not equals else 1
                continue
            words += 1
            if words == 2:
                args = [*args[:index], "--", *args[index:]]
                break
            index += 1
        return super().parse_args(ctx, args)


def _said(error: typer.TyperException) -> str:
    """What is wrong with the command line, with near names only."""
    option = getattr(error, "option_name", None)
    if option is None:
        said = error.format_message().replace("Value error, ", "")  # pydantic's word before a choice that does not exist
        choice = re.search(r"'([^']*)' is not one of (.*)\.$", said)
        return said + did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2])) if choice else said
    return f"No such option: {option}.{did_you_mean(option, getattr(error, 'possibilities', None) or ())}"


def _fail(out: dict[str, Any], code: int, *, as_json: bool, hint: str = "") -> int:
    typer.echo(f"error: {out['error']}{hint}", err=True)
    if as_json:
        print_json(out)
    return code


app = typer.Typer(
    cls=Commands,
    name="lightning-hetero",
    help="Measure a machine, plan for a model, explain the plan; inspect stores and weights, and convert them.",
    epilog="Exit codes: 0 success; 1 a problem was found; 2 the request is wrong or impossible.",
    add_completion=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from lightning_hetero import __version__

        typer.echo(f"lightning-hetero {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file (JSON).")]


@app.command(epilog=epilog("doctor"))
def doctor(
    path: Annotated[Path, typer.Option(metavar="DIR", help="The directory for the disk tier.")] = Path(),
    as_json: o.Json = False,
) -> None:
    """Checks this machine.

    Versions, native library, memory limits, disk, device; exits 1 if something is wrong.
    """
    from lightning_hetero.cli import doctor as command

    if command.run(path, as_json=as_json):
        raise typer.Exit(PROBLEM)


@app.command(epilog=epilog("profile"))
def profile(
    path: Annotated[Path | None, typer.Option(metavar="DIR", help="A directory on the disk to measure.  [default: .]")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the profile here.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again instead of using the cached profile.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help="Where training computes: cpu, or torch's name of the GPU.  [default: a GPU if there is one]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE:FUNCTION", help="Measure the layers of your model instead, for plan-cluster.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Measures this machine.

    Links, disk, update kernels, memory, and how much they slow each other; or the layers of a
    model.
    """
    from lightning_hetero.cli import profile as command
    from lightning_hetero.cli import profile_model

    if model is not None:
        if path is not None or refresh:
            raise ConfigError("--model measures a model each time; --path and --refresh are about the machine. Leave them out.")
        profile_model.run(model, out=out, device=device, as_json=as_json)
        return
    command.run(path, out=out, refresh=refresh, device=device, as_json=as_json)


@app.command(epilog=epilog("plan"))
@o.options_of_a_request
def plan(
    *,
    request: o.Request,
    planner: Annotated[str, typer.Option(metavar="NAME", help='The planner, such as lohan, or "all".')] = DEFAULT,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the planner; may repeat.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here; of all planners' the fastest.")] = None,
    as_json: o.Json = False,
) -> None:
    """Plans a model on a machine. Says what lives where, and how long a step will take."""
    from lightning_hetero.cli import plan as command

    command.run(request, planner=planner, options=option or [], out=out, as_json=as_json)


@app.command(epilog=epilog("explain"))
@o.options_of_a_request
def explain(
    *,
    plan: PlanFile,
    request: o.Request,
    as_json: o.Json = False,
) -> None:
    """Explains a plan.

    Placement and reasons, the binding resource, other planners' plans, the gain from more hardware.
    """
    from lightning_hetero.ir.cluster_plan import is_cluster_plan

    if plan.is_file() and is_cluster_plan(plan.read_bytes()):
        from lightning_hetero.cli import explain_cluster

        if given := request.given():
            raise ConfigError(
                f"{plan} is a cluster plan, which names its own model and cluster; {given} would change nothing. Leave it out, or "
                f"plan anew with plan-cluster."
            )
        explain_cluster.run(plan, as_json=as_json)
        return
    from lightning_hetero.cli import explain as command

    command.run(plan, request, as_json=as_json)


@app.command(epilog=epilog("simulate"))
@o.options_of_a_request
def simulate(
    *,
    plan: PlanFile,
    request: o.Request,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace, for Perfetto.")] = None,
    timeline: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture (PNG, SVG or PDF) of one step.")] = None,
    as_json: o.Json = False,
) -> None:
    """Simulates a plan. Predicts one step, and writes its trace and its timeline."""
    from lightning_hetero.cli import simulate as command

    command.run(plan, request, trace=trace, timeline=timeline, as_json=as_json)


@app.command(epilog=epilog("report"))
@o.options_of_a_request
def report(
    *,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A plan file, a trace, or a folder of TraceOnDemand.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the page here.")] = Path("report.html"),
    of: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="The plan of a trace, to compare both.")] = None,
    request: o.Request,
    as_json: o.Json = False,
) -> None:
    """Shows a plan, a trace or a recorded run as one HTML page.

    Where every tensor lives, one step predicted and measured, what compute waits for, what would
    help.
    """
    from lightning_hetero.cli import report as command

    command.run(path, request, plan=of, out=out, as_json=as_json)


@app.command("plan-cluster", epilog=epilog("plan-cluster"))
def plan_cluster(
    cluster: Annotated[
        str,
        typer.Argument(metavar="CLUSTER", help='A cluster file (YAML, JSON), a known cluster, or "4xa100-80+2xh800".'),
    ],
    micro_batches: Annotated[int, typer.Option(min=1, metavar="N", help="Micro-batches of one step, of all devices together.")],
    model_profile: o.ModelFile = None,
    preset_model: o.PresetModel = None,
    model_config: o.ModelConfig = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences of a micro-batch.")] = None,
    sequence: o.Sequence = None,
    precision: o.Precision = None,
    planner: Annotated[str, typer.Option(metavar="NAME", help='The planner, such as whale, or "all".')] = "asymmetric",
    tensor_parallel: Annotated[
        list[int] | None, typer.Option(metavar="N", help="A degree to try; may repeat.  [default: all powers of two]")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here; of all planners' the fastest.")] = None,
    as_json: o.Json = False,
) -> None:
    """Plans a cluster of different devices.

    Says which devices form pipelines and hold which layers, and the step time.
    """
    from lightning_hetero.cli import plan_cluster as command
    from lightning_hetero.cli.clusters import ClusterRequest

    model = o.Request(
        model_profile=model_profile, preset_model=preset_model, model_config=model_config, batch=batch, sequence=sequence,
        precision=precision,
    )  # fmt: skip
    degrees = tuple(tensor_parallel or ())
    request = ClusterRequest(cluster=cluster, micro_batches=micro_batches, model=model, tensor_parallel=degrees)
    command.run(request, planner=planner, out=out, as_json=as_json)


@app.command(cls=UpToScript)
def launch(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A cluster plan (JSON).")],
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT...", help="The training script and its arguments.")],
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the rendezvous store runs.")],
    least_nodes: Annotated[int, typer.Option(metavar="N", help="Least number of nodes with which training continues.")] = 1,
    run_id: Annotated[str, typer.Option(metavar="NAME", help="Distinguishes several runs that use one store.")] = "hetero",
    steps: Annotated[str | None, typer.Option(metavar="PATH", help="Where steps are committed; a directory or URL.")] = None,
    run: Annotated[str | None, typer.Option(metavar="NODE", help='Run this node\'s line, or the "store".')] = None,
    as_json: o.Json = False,
) -> None:
    """Prints the torchrun commands that start a cluster plan, or runs one.

    Nodes may vanish and join during training.
    """
    from lightning_hetero.cli import launch as command

    command.run(plan, script, rendezvous=rendezvous, least_nodes=least_nodes, run_id=run_id, steps=steps, name=run, as_json=as_json)


SomePath = Annotated[Path, typer.Argument(metavar="PATH", help="A store, safetensors, a checkpoint or a plan file.")]
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="A directory for safetensors, or FILE.ckpt; or a URL.")]
Checkpoint = Annotated[str, typer.Argument(metavar="FILE.ckpt", help="The checkpoint to write.")]
Module = Annotated[str, typer.Option(metavar="NAME", help='A module of the LightningModule, such as "model".')]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Convert floating-point weights.  [default: as they are]")
]


@app.command(epilog=epilog("inspect"))
def inspect(path: SomePath, as_json: o.Json = False) -> None:
    """Shows the contents of a path.

    A store, safetensors, a checkpoint or a plan; reads headers only, executes nothing.
    """
    from lightning_hetero.cli import inspect as command

    command.run(path, as_json=as_json)


@app.command(epilog=epilog("verify"))
def verify(path: SomePath, as_json: o.Json = False) -> None:
    """Checks that a path is complete and undamaged.

    Every stamp, digest, checksum and header; exits 1 if something is wrong.
    """
    from lightning_hetero.cli import verify as command

    if command.run(path, as_json=as_json):
        raise typer.Exit(PROBLEM)


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A store, a checkpoint or safetensors.")],
    destination: Destination,
    module: Module = "",
    dtype: Dtype = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="No safetensors file is larger.")] = "5GB",
    merge: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Merge the adapter that PEFT has saved there, or that of a store."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Writes weights for other programs.

    As safetensors, or as a Lightning checkpoint with weights only.
    """
    from lightning_hetero.cli import export_import as command

    command.export(source, destination, module=module, dtype=dtype, max_shard_size=max_shard_size, merge=merge, as_json=as_json)


@app.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A safetensors file, or a directory of Hugging Face.")],
    destination: Checkpoint,
    module: Module = "",
    tie: Annotated[
        list[str] | None, typer.Option(metavar="NAME=OTHER", help="A tied weight that the files lack; may repeat.")
    ] = None,
    dtype: Dtype = None,
    as_json: o.Json = False,
) -> None:
    """Converts safetensors to a Lightning checkpoint with weights only.

    Nothing is loaded as a whole.
    """
    from lightning_hetero.cli import export_import as command

    command.import_(source, destination, module=module, ties=tie or [], dtype=dtype, as_json=as_json)


AsYaml = Annotated[bool, typer.Option("--yaml", help="Print a configuration of LightningCLI instead of Python.")]


@app.command("from-deepspeed")
def from_deepspeed(
    source: Annotated[str, typer.Argument(metavar="CONFIG", help="A JSON file, or Lightning's DeepSpeedStrategy as text.")],
    as_yaml: AsYaml = False,
    as_json: o.Json = False,
) -> None:
    """Prints what settings of DeepSpeed are here.

    The strategy, the Trainer and the optimizer; every key without a counterpart, and why.
    """
    from lightning_hetero.cli.porting import show
    from lightning_hetero.porting import deepspeed

    show(deepspeed.from_deepspeed(source), as_yaml=as_yaml, as_json=as_json)


@app.command("from-fsdp")
def from_fsdp(
    source: Annotated[str, typer.Argument(metavar="CALL", help="Such as 'FSDPStrategy(cpu_offload=True)'.")],
    as_yaml: AsYaml = False,
    as_json: o.Json = False,
) -> None:
    """Prints what arguments of FSDP are here: Lightning's, or those of torch."""
    from lightning_hetero.cli.porting import show
    from lightning_hetero.porting import fsdp

    show(fsdp.from_fsdp(source), as_yaml=as_yaml, as_json=as_json)


@app.command("from-accelerate")
def from_accelerate(
    source: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a call of Accelerator as text.")],
    as_yaml: AsYaml = False,
    as_json: o.Json = False,
) -> None:
    """Prints what a configuration of accelerate is here, with the DeepSpeed or FSDP inside."""
    from lightning_hetero.cli.porting import show
    from lightning_hetero.porting import accelerate

    show(accelerate.from_accelerate(source), as_yaml=as_yaml, as_json=as_json)
