"""Commands of `psctl` that need no worker code: coordinator, server, status, plan. Torch-free itself.

Each command imports what it needs when it runs, so that `--help` and `status` answer at once.
Exit codes: 0 done · 1 the job or the command failed · 2 a wrong flag, setting or address · 3 no coordinator within the
stated bound · 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ps import logs, memory
from ps.config import CONSISTENCIES, CoordinatorConfig, MemberConfig, ServerConfig, environment
from ps.errors import ConfigError, CoordinatorLost, PsError
from ps.types import Address

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_COORDINATOR = 3
EXIT_INTERRUPTED = 130

Command = Callable[[argparse.Namespace], int]
"""Runs a parsed command line; returns the exit code."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `ArgumentParser.add_subparsers` returns; argparse has no public name for it."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows each flag's default, where it has one worth showing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or action.default in (None, False, argparse.SUPPRESS) or not action.option_strings:
            return action.help
        shown = ",".join(action.default) if isinstance(action.default, tuple) else action.default
        return f"{action.help} (default: {shown})"


def add_command(commands: Commands, name: str, run: Command, text: str,
                usage: str | None = None) -> argparse.ArgumentParser:  # fmt: skip
    """A sub-command whose help begins with `text`; its first sentence is the line in the list of commands."""
    parser = commands.add_parser(
        name,
        help=text.split(". ")[0].rstrip("."),
        description=text,
        usage=usage,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_commands(commands: Commands) -> None:
    """Add this module's commands."""
    _add_coordinator(commands)
    _add_server(commands)
    _add_status(commands)
    _add_plan(commands)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, run, and turn expected errors into one line on stderr and an exit code."""
    options = parser.parse_args(argv)
    command: Command = options.run
    try:
        return command(options)
    except ConfigError as error:
        return _complain(error, EXIT_USAGE)
    except CoordinatorLost as error:
        return _complain(error, EXIT_NO_COORDINATOR)
    except PsError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone; without this Python complains once more while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m ps`: the commands of this module alone."""
    parser = argparse.ArgumentParser(prog="python -m ps", description="Coordinator and servers of torch-ps.")
    parser.set_defaults(own_process=argv is None)
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    return run_command(parser, argv)


def add_member_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of everything that joins a job; `member_config` reads them."""
    add_coordinator_flag(parser)
    default = MemberConfig(coordinator=Address("unset", 1))
    parser.add_argument("--name", help="name in status and logs (PS_NAME); chosen by the coordinator if not given")
    parser.add_argument(
        "--advertise", metavar="IP",
        help="address of this host that the others can reach (PS_ADVERTISE); if not given, the one that routes to the "
        "coordinator",
    )  # fmt: skip
    parser.add_argument("--interface", metavar="IF", help="network interface to use instead (PS_INTERFACE), e.g. eth0")
    parser.add_argument(
        "--join-timeout-s", type=float, metavar="S",
        help=f"keep trying to reach the coordinator for this long (PS_JOIN_TIMEOUT_S; {default.join_timeout_s:g} if "
        "not given), then exit with code 3",
    )  # fmt: skip


def add_coordinator_flag(parser: argparse.ArgumentParser) -> None:
    """`--coordinator`; `coordinator_address` reads it."""
    parser.add_argument("--coordinator", metavar="H:P", help="address of the coordinator (PS_COORDINATOR)")


def coordinator_address(options: argparse.Namespace) -> Address:
    """The coordinator's address from the flag, else from the environment; raises `ConfigError`."""
    text = options.coordinator or environment().get("PS_COORDINATOR", "")
    if not text:
        raise ConfigError("no coordinator: give --coordinator HOST:PORT, or set PS_COORDINATOR")
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"--coordinator: {error}") from None


def member_config(options: argparse.Namespace) -> MemberConfig:
    """Settings from the flags of `add_member_flags`, else from the environment; raises `ConfigError`."""
    env = environment()
    timeout = options.join_timeout_s
    if timeout is None:
        try:
            timeout = float(env.get("PS_JOIN_TIMEOUT_S") or MemberConfig(coordinator=Address("", 0)).join_timeout_s)
        except ValueError:
            raise ConfigError(f"PS_JOIN_TIMEOUT_S={env['PS_JOIN_TIMEOUT_S']!r} is not a number of seconds") from None
    if not timeout > 0:
        raise ConfigError(f"--join-timeout-s {timeout:g} must be greater than 0")
    return MemberConfig(
        coordinator=coordinator_address(options),
        name=options.name or env.get("PS_NAME", ""),
        advertise=options.advertise or env.get("PS_ADVERTISE", ""),
        interface=options.interface or env.get("PS_INTERFACE", ""),
        join_timeout_s=timeout,
    )


def restart_for_memory(options: argparse.Namespace) -> None:
    """Start this process again with the memory settings, unless it was called by other code than the command line."""
    if options.own_process:
        memory.restart_with_settings(os.environ)


def _complain(error: Exception, code: int) -> int:
    sys.stderr.write(f"psctl: {type(error).__name__}: {error}\n")
    return code


def _add_coordinator(commands: Commands) -> None:
    parser = add_command(
        commands, "coordinator", _coordinator,
        "Run the coordinator of a job. It keeps members, the map of the shards and the data leases, never a tensor. "
        "It listens in plain text: keep it on loopback or a private network.",
    )  # fmt: skip
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="port to listen on; 0 = any free one, which is then printed")
    add("--state", type=Path, required=True, metavar="FILE", help="SQLite file; a coordinator that finds one goes on")
    add("--servers", type=int, default=1, help="servers to wait for before the model is placed")
    add("--min-workers", type=int, default=0, help="hand out data once this many workers are live; later ones are free")
    add("--consistency", default="asp", help=f"one of: {', '.join(CONSISTENCIES)}")
    add("--exact", action="store_true", help="servers run kernels that give plain PyTorch's bits, at some speed")
    add("--shard-bytes", type=int, default=0, help="target size of a shard; 0 = from the model's size")
    add("--heartbeat-s", type=float, default=1.0, help="seconds between two heartbeats of a member")
    add("--lease-s", type=float, default=10.0, help="a member not heard of for this long is evicted")
    add("--no-workers-s", type=float, default=60.0, help="a job with work left and no worker for this long has failed")
    add("--lost-coordinator-s", type=float, default=30.0, help="members exit when the coordinator is gone this long")
    add("--hold", action="store_true", help="after the end, stay until released, so that the model can be exported")
    add("--max-members", type=int, default=1024, help="members at the same time")
    add("--transports", type=_names, default=("uv",), metavar="A,B", help="TensorPipe transports, best first, uv last")
    add(
        "--channels", type=_names, default=("basic",), metavar="A,B", help="TensorPipe channels, best first, basic last"
    )
    add("--address-file", type=Path, metavar="FILE", help="write host:port here as soon as it listens")
    add("--summary-file", type=Path, metavar="FILE", help="write the job's summary (JSON) here at its end")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _coordinator(options: argparse.Namespace) -> int:
    from dataclasses import fields

    from ps.control.server import run_coordinator

    logs.setup(who="coordinator")
    config = CoordinatorConfig(**{field.name: getattr(options, field.name) for field in fields(CoordinatorConfig)})
    return run_coordinator(config)


def _add_server(commands: Commands) -> None:
    default = ServerConfig(member=MemberConfig(coordinator=Address("unset", 1)))
    parser = add_command(
        commands, "server", _server,
        "Run a server: it holds shards of the model and applies the workers' gradients to them. It starts itself again "
        "with memory settings that make big messages cheap, unless PS_KEEP_ENVIRONMENT=1. SIGTERM ends it.",
    )  # fmt: skip
    add_member_flags(parser)
    add = parser.add_argument
    add("--rpc-threads", type=int, default=default.rpc_threads, help="threads that take requests")
    add("--apply-threads", type=int, default=default.apply_threads, help="threads that run the optimizer")
    add("--snapshots", type=int, default=default.snapshots, help="pooled reply buffers per message layout")


def _server(options: argparse.Namespace) -> int:
    config = ServerConfig(
        member=member_config(options),
        rpc_threads=options.rpc_threads,
        apply_threads=options.apply_threads,
        snapshots=options.snapshots,
    )
    restart_for_memory(options)
    logs.setup(who=config.member.name or "server")
    from ps.server.process import run_server

    return run_server(config)


def _add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", _status, "Show a running job: members, shards and progress.")
    add_coordinator_flag(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, with exact numbers")
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="S", help="how long to wait for the answer")


def _status(options: argparse.Namespace) -> int:
    from ps import views
    from ps.control import client

    if not options.timeout_s > 0:
        raise ConfigError(f"--timeout-s {options.timeout_s:g} must be greater than 0")
    reply = client.status(coordinator_address(options), options.timeout_s)
    if options.json:
        views.print_json(views.status_record(reply))
    else:
        views.print_status(reply)
    return 0


def _add_plan(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", _plan,
        "Show how a model would be cut into shards and laid on servers. Needs no cluster; the factory is called on the "
        "meta device where it can be, so that a big model costs no memory.",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", required=True, metavar="PKG.MOD:FACTORY", help="called without arguments, returns a torch.nn.Module")
    add("--servers", type=int, required=True, metavar="N", help="number of servers")
    add("--shard-bytes", type=int, default=0, help="target size of a shard; 0 = from the model's size")
    add("--optimizer", default="AdamW", metavar="CLASS", help="class in torch.optim; some need whole tensors")
    add("--json", action="store_true", help="as JSON")


def _plan(options: argparse.Namespace) -> int:
    from ps import planning, views

    if options.servers < 1:
        raise ConfigError(f"--servers {options.servers} must be at least 1")
    sys.path.insert(0, str(Path.cwd()))  # as python -m would: the model is the user's own module
    signature = planning.signature(options.model, options.optimizer)
    layout = planning.layout(signature, options.servers, options.shard_bytes)
    if options.json:
        views.print_json(views.plan_record(layout))
    else:
        views.print_plan(layout)
    return 0
