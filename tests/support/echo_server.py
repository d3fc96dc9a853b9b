"""`python -m tests.support.echo_server INCARNATION [CLOSE_TIMEOUT_S]`: an RPC process that serves an `EchoHost`.

Prints its address, serves until its standard input ends, prints `closed` or `wedged`, exits.
"""

from __future__ import annotations

import os
import sys

from ps.rpc import agent
from ps.types import Incarnation
from tests.support.echo import EchoHost


def main() -> None:
    """Serve until told to stop."""
    host = EchoHost()
    if len(sys.argv) > 2:
        agent.CLOSE_TIMEOUT_S = float(sys.argv[2])
    transport = agent.open_rpc(
        incarnation=Incarnation(int(sys.argv[1])), name="echo-server", host_ip="127.0.0.1", shard_host=host
    )
    sys.stdout.write(f"{transport.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    transport.close()
    sys.stdout.write("wedged\n" if transport.wedged else "closed\n")
    sys.stdout.flush()
    host.close()
    os._exit(0)


if __name__ == "__main__":
    main()
