"""Measure, write the results files, and draw plots, and the tables of the README and of the pages, from them."""

import argparse
import os
import sys
from pathlib import Path

import torch

from tests.benchmarks import (
    accuracy,
    counts,
    cpu,
    gpu,
    gpu_tests,
    gpu_worker,
    layers,
    memory,
    peers,
    plots,
    predictions,
    questions,
    report,
    scaling,
    wheels,
)

OWN = {
    "product": (cpu, "the product on this CPU, with what it should reach"),
    "questions": (questions, "the questions of a chain, likewise"),
    "layers": (layers, "logchain.nn, likewise"),
    "counts": (counts, "operators, allocations and frames of our own calls, which the tests compare"),
}
# each in a process of its own: a part can be chosen
EVERYBODY = {
    "peers": (peers, "times beside everybody else's"),
    "accuracy": (accuracy, "everybody's errors"),
    "memory": (memory, "everybody's peaks"),
    "scaling": (scaling, "times against v, c and n, ours and some peers'"),
}
GROUPS = OWN | EVERYBODY


def group(name: str) -> str:
    """An argument."""
    if name not in GROUPS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(GROUPS)}, got {name}")
    return name


def run(options: argparse.Namespace) -> None:
    """Measure some groups, or all."""
    for name in options.groups or GROUPS:
        print(f"measuring: {name}", flush=True)
        if name in OWN:
            OWN[name][0].main()
        else:
            EVERYBODY[name][0].main(options.only, options.workloads)
    publish(options)


def publish(_: argparse.Namespace) -> None:
    """From the results files."""
    plots.draw()
    report.update()
    print(report.figures())


def measure_gpu(options: argparse.Namespace) -> int:
    """The third call on a GPU, or a dry run of it without one."""
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU here: --dry runs the same on a CPU, without meaning")
    os.environ["TRITON_CACHE_DIR"] = str(gpu_tests.cache(options.folder))
    with wheels.installed(options.wheels):
        return gpu.measure(
            folder=options.folder, minutes=options.minutes, out=options.out, only=options.only, dry=options.dry
        )


parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
commands = parser.add_subparsers(required=True)

on_cpu = commands.add_parser("run", help="on this CPU")
groups = "; ".join(f"{name}: {what}" for name, (_, what) in GROUPS.items())
on_cpu.add_argument("groups", nargs="*", type=group, metavar="group", help=groups)
on_cpu.add_argument("--only", nargs="+", default=(), help=f"{', '.join(EVERYBODY)}: parts of providers' names")
on_cpu.add_argument("--workloads", nargs="+", default=(), help="of the same: parts of workloads' names, n=10 or c=64")
on_cpu.set_defaults(call=run)

drawn = commands.add_parser("plot", help="the plots and all tables, from the results files")
drawn.set_defaults(call=publish)

on_gpu = commands.add_parser("gpu", help="on a GPU, in three calls, each of which goes on where the last was cut")
calls = on_gpu.add_subparsers(required=True)
shared = argparse.ArgumentParser(add_help=False)
shared.add_argument("--folder", type=Path, default=Path("build/gpu"), help="what one call leaves for the next")
shared.add_argument("--out", type=Path, help="a folder for copies of what came out")
shared.add_argument("--minutes", type=float, default=8.0, help="what does not fit is left for the next call")
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
pooled = argparse.ArgumentParser(add_help=False)
pooled.add_argument("--workers", type=int, default=cores, help="processes")
pooled.add_argument("--patience", type=float, default=240.0, help="seconds that one test may take")
pooled.add_argument("--paths", nargs="+", default=gpu_worker.EVERYTHING, help="files of tests; all tests and figures")


def of(options: argparse.Namespace) -> gpu_tests.Call:
    """The options that the first two calls share."""
    return gpu_tests.Call(**{name: getattr(options, name) for name in gpu_tests.Call._fields})


compiled = calls.add_parser("compile", parents=[shared, pooled], help="every kernel that tests and figures launch")
compiled.add_argument("--target", help="sm_80, sm_90, ...: where it is not this machine's")
compiled.set_defaults(call=lambda options: gpu_tests.compile_kernels(of(options), options.target))
tested = calls.add_parser("test", parents=[shared, pooled], help="the tests marked gpu")
tested.add_argument("--dry", action="store_true", help="in Triton's interpreter")
tested.set_defaults(call=lambda options: gpu_tests.test(of(options), dry=options.dry))
measured = calls.add_parser("measure", parents=[shared], help="times, memory, errors, peers")
measured.add_argument("--only", nargs="+", default=(), choices=gpu.GROUPS, help="groups; tiles only if named")
measured.add_argument("--dry", action="store_true", help="run everything on a CPU, on tiny sizes")
measured.add_argument("--wheels", type=Path, help="a folder that `python -m tests.benchmarks.wheels` has filled")
measured.set_defaults(call=measure_gpu)

predicted = commands.add_parser("predict", help="what a model says of a GPU")
predicted.set_defaults(call=lambda _: predictions.write())

chosen = parser.parse_args()
sys.exit(chosen.call(chosen))
