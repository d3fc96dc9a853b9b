"""Goodput of a whole step, push and pull, against everything that a user could take instead.

    python benchmarks/push_pull.py --mb 100 --link loopback --json result.json

Everybody moves the same model (60 tensors of float32) with constant gradients, and really applies `w -= 0.1 * g`; the
weights are checked at the end. Goodput counts bytes pushed plus bytes pulled, for one worker. On loopback ours runs
twice: over TCP as between hosts, and over shared memory as it may on one host. Over a shaped link workers and servers
are in namespaces of their own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import contenders
from contenders import COPIES, DDP_FLAT, DDP_TENSORS, OURS, RPC_BULK, RPC_EACH, SOCKETS, Group, Model, Shape, same_host
from harness import Report, Turns, alternate, environment
from links import LINKS, Link
from processes import ALLOCATIONS, Children, settings

LARGE_MB = 200
"""Above this the machine's memory does not hold every contender at the same time: only the strongest run."""

BASELINES = (RPC_BULK, RPC_EACH, DDP_FLAT, DDP_TENSORS)
"""What goes over TCP and is no mere limit."""


def main() -> None:
    """Parse, measure, report."""
    options = _options()
    model = Model(options.mb)
    shape = Shape(
        servers=options.servers,
        message_bytes=int(options.message_mb * (1 << 20)),
        shard_bytes=min(8 << 20, int(options.message_mb * (1 << 20))) if options.message_mb < 8 else 0,
        calls_in_flight=options.calls_in_flight,
    )
    with Children(settings(options.allocation)) as children, Link(options.link) as link:
        groups = _groups(children, link, model, shape, quick=options.quick)
        for group in groups:
            group.wait_ready()
        turns = alternate(groups, rounds=options.rounds, turn_s=0.3 if options.quick else 0.6)
        rss = {group.name: group.rss_bytes() for group in groups}
        report = _report(options, children, link, model, shape)
    _fill(report, turns, link, rss)
    report.write(options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100, help="size of the model in 1e6 bytes")
    parser.add_argument("--link", choices=LINKS, default="loopback")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--message-mb", type=float, default=8, help="size of our messages in MiB")
    parser.add_argument("--calls-in-flight", type=int, default=Shape.calls_in_flight)
    parser.add_argument("--allocation", choices=ALLOCATIONS, default="tuned", help="memory settings, for everybody")
    parser.add_argument("--rounds", type=int, default=7, help="alternations")
    parser.add_argument("--quick", action="store_true", help="fewer contenders, less than a minute")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 5)
    return options


def _groups(children: Children, link: Link, model: Model, shape: Shape, *, quick: bool) -> list[Group]:
    few = quick or model.mb > LARGE_MB
    groups = [
        contenders.ours(children, link, model, shape),
        contenders.torch_rpc(children, link, model, "bulk", RPC_BULK),
        contenders.gloo(children, link, model, "flat", DDP_FLAT),
    ]
    if not few:
        groups.append(contenders.torch_rpc(children, link, model, "per_parameter", RPC_EACH))
    if not few:
        groups += [
            contenders.gloo(children, link, model, "ddp", DDP_TENSORS),
            contenders.sockets(children, link, model),
        ]
    if not link.shaped:
        on = contenders.TORCH_DEFAULT
        each = contenders.torch_rpc(children, link, model, "per_parameter", same_host(RPC_EACH), on)
        groups += [contenders.ours(children, link, model, shape.on_same_host(), same_host(OURS)), each]
        if not few:
            groups.append(contenders.copies(children, link, model))
    return groups


def _report(options: argparse.Namespace, children: Children, link: Link, model: Model, shape: Shape) -> Report:
    name = f"push_pull-{options.mb:g}mb-{link.name}-{shape.servers}s-{options.message_mb:g}mb-{options.allocation}"
    return Report(
        name=name + "-quick" * options.quick,
        title=f"Push and pull: {options.mb:g} MB in {model.tensors} tensors, {link.name}, {shape.servers} server(s)",
        config={key: str(value) for key, value in vars(options).items()} | {"nbytes": model.nbytes},
        environment=environment(children.settings),
        columns=("who", "goodput MB/s", "ms per step", "link bytes / model bytes", "CPU s per GB", "RSS MB w, s"),
    )


def _fill(report: Report, turns: Turns, link: Link, rss: dict[str, tuple[int, int]]) -> None:
    report.samples = turns.samples
    for name in turns.samples:
        crossed = turns.stats(name, lambda sample: sample.crossed_bytes / sample.bytes_moved)
        cpu = turns.stats(name, lambda sample: sample.cpu_s / sample.bytes_moved * 1e9)
        report.rows.append(
            (
                name,
                str(turns.goodput(name).scaled(1e-6)),
                str(turns.step_s(name).scaled(1e3)),
                f"{crossed.median:.2f}",
                f"{cpu.median:.2f}",
                ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in rss[name]),
            )
        )
        report.medians[name] = turns.goodput(name).median
    best = turns.best_of([name for name in BASELINES if name in turns.samples])
    report.notes.append(f"best baseline over TCP: {best}")
    if link.payload_bytes_per_s is None:
        _loopback_ratios(report, turns, best)
    else:
        ceiling = 2 * link.payload_bytes_per_s
        report.add_ratio(
            "link_utilisation", turns.goodput(OURS).scaled(1 / ceiling), {"1gbit": "≥ 0.93"}.get(link.name, "≥ 0.75")
        )
        report.add_ratio("over_best_baseline", turns.ratio(OURS, best), "≥ 1")
        report.notes.append(f"payload of the link, both directions: {ceiling / 1e6:.1f} MB/s")
    if SOCKETS in turns.samples:
        report.add_ratio("over_raw_socket", turns.ratio(OURS, SOCKETS))


def _loopback_ratios(report: Report, turns: Turns, best: str) -> None:
    report.add_ratio("tcp_over_best_baseline", turns.ratio(OURS, best), "≥ 1, aim 1.2")
    mine = same_host(OURS)
    gloo = turns.best_of([name for name in (DDP_FLAT, DDP_TENSORS) if name in turns.samples])
    report.add_ratio("same_host_over_gloo", turns.ratio(mine, gloo), "≥ 2")
    report.add_ratio("same_host_over_rpc_per_parameter", turns.ratio(mine, same_host(RPC_EACH)), "≥ 2")
    if COPIES in turns.samples:
        report.add_ratio("same_host_over_memcpy", turns.ratio(mine, COPIES))


if __name__ == "__main__":
    main()
