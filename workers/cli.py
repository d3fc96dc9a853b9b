"""`psctl`: the commands of `ps.cli`, and those that need the worker side: local, worker, export. Torch-free itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ps import cli, logs
from ps.config import CONSISTENCIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run `psctl`; `argv` None: the process's own command line. Returns the exit code."""
    parser = build_parser()
    parser.set_defaults(own_process=argv is None)
    return cli.run_command(parser, argv)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line of `psctl`."""
    parser = argparse.ArgumentParser(
        prog="psctl",
        description="Train PyTorch models on parameter servers. `psctl local` runs a whole cluster on this machine; "
        "coordinator, server and worker are its parts, to be started by hand on one host or many, in any order.",
        epilog="exit codes: 0 done · 1 failed · 2 wrong flag or setting · 3 no coordinator · 130 interrupted; "
        "local and worker: the script's own code when it failed",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('torch-ps')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_local(commands)
    _add_worker(commands)
    cli.add_commands(commands)
    _add_export(commands)
    return parser


def _add_local(commands: cli.Commands) -> None:
    parser = cli.add_command(
        commands, "local", _local,
        "Run a script on a cluster of child processes. Shows their logs and the progress, leaves a run folder with "
        "summary.json, logs and model.safetensors, and leaves no process behind. Ctrl-C once: workers finish their "
        "step, the model is saved; twice: everything is killed.",
        usage="psctl local [-h] [--servers N] [--workers N] [--exact] [--run-dir DIR] [...] SCRIPT [ARGS...]",
    )  # fmt: skip
    add = parser.add_argument
    add("--servers", type=int, default=1, metavar="N", help="server processes")
    add("--workers", type=int, default=1, metavar="N", help="worker processes, each running SCRIPT")
    add("--consistency", default="asp", metavar="C", help=f"one of: {', '.join(CONSISTENCIES)}")
    add("--exact", action="store_true", help="servers run kernels that give plain PyTorch's bits, at some speed")
    add("--shard-bytes", type=int, default=0, metavar="N", help="target size of a shard; 0 = from the model's size")
    add("--run-dir", type=Path, metavar="DIR", help="run folder; runs/<time> if not given")
    _add_script(parser)


def _local(options: argparse.Namespace) -> int:
    from workers import launch

    logs.setup(who="psctl")
    config = launch.LocalConfig(
        script=Path(options.script),
        arguments=tuple(options.arguments),
        servers=options.servers,
        workers=options.workers,
        consistency=options.consistency,
        exact=options.exact,
        shard_bytes=options.shard_bytes,
        run_dir=options.run_dir,
    )
    return launch.run(config)


def _add_worker(commands: cli.Commands) -> None:
    parser = cli.add_command(
        commands, "worker", _worker,
        "Run a script as a worker of a job. Exits with the script's code. It starts itself again with memory settings "
        "that make big messages cheap, unless PS_KEEP_ENVIRONMENT=1. SIGTERM or Ctrl-C: it finishes its step, hands "
        "its data back and exits; again: at once.",
        usage="psctl worker [-h] --coordinator H:P [--name NAME] [--advertise IP] [--interface IF] SCRIPT [ARGS...]",
    )  # fmt: skip
    cli.add_member_flags(parser)
    parser.add_argument(
        "--error-file", type=Path, metavar="FILE",
        help="write how the script failed here (JSON), instead of its traceback to stderr",
    )  # fmt: skip
    _add_script(parser)


def _worker(options: argparse.Namespace) -> int:
    config = cli.member_config(options)
    cli.restart_for_memory(options)
    logs.setup(who=config.name or "worker")
    # the script calls workers.join() without arguments: these are what it finds
    os.environ["PS_COORDINATOR"] = str(config.coordinator)
    os.environ["PS_JOIN_TIMEOUT_S"] = str(config.join_timeout_s)
    for variable, value in (("NAME", config.name), ("ADVERTISE", config.advertise), ("INTERFACE", config.interface)):
        if value:
            os.environ[f"PS_{variable}"] = value
    from workers.script import run_script

    return run_script(Path(options.script), options.arguments, config, error_file=options.error_file)


def _add_export(commands: cli.Commands) -> None:
    parser = cli.add_command(
        commands, "export", _export,
        "Write the model's parameters, as they are on the servers now, to one safetensors file. Training goes on.",
    )  # fmt: skip
    cli.add_member_flags(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="replaced as a whole or not at all")


def _export(options: argparse.Namespace) -> int:
    member = cli.member_config(options)
    logs.setup(who="export")
    from workers.config import WorkerConfig
    from workers.export import export

    config = WorkerConfig(
        coordinator=member.coordinator,
        name=member.name,
        advertise=member.advertise,
        interface=member.interface,
        join_timeout_s=member.join_timeout_s,
    )
    export(config, options.output)
    return 0


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Python file, run as `python SCRIPT ARGS...` would")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
