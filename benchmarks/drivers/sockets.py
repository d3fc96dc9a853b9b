"""Limit: a model's bytes over one plain TCP connection, to the server and back at the same time (full duplex).

`server` echoes: it sends each chunk back from its own buffer once that chunk has come in. `client` sends on one thread
and receives on another. No parameter server can push and pull with less work; nothing is applied.
"""

from __future__ import annotations

import argparse
import socket
import threading

from serve import say, serve, wait_for_end

CHUNK_BYTES = 1 << 20


def receive(connection: socket.socket, buffer: memoryview) -> int:
    """Fill `buffer`; returns what came, less than its size only at the end of the connection."""
    at = 0
    while at < len(buffer):
        count = connection.recv_into(buffer[at:])
        if not count:
            break
        at += count
    return at


def cuts(nbytes: int) -> list[slice]:
    """A model's bytes in chunks."""
    return [slice(begin, min(begin + CHUNK_BYTES, nbytes)) for begin in range(0, nbytes, CHUNK_BYTES)]


def echo(connection: socket.socket, nbytes: int) -> None:
    """Serve one client until it hangs up."""
    pushed, weights = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    arrived = threading.Semaphore(0)
    gone = threading.Event()

    def answer() -> None:
        while True:
            for cut in cuts(nbytes):
                arrived.acquire()
                if gone.is_set():
                    return
                connection.sendall(weights[cut])

    answering = threading.Thread(target=answer, name="answer")
    answering.start()
    while not gone.is_set():
        for cut in cuts(nbytes):
            if receive(connection, pushed[cut]) < cut.stop - cut.start:
                gone.set()
                arrived.release()
                break
            arrived.release()
    answering.join()


def run_server(options: argparse.Namespace) -> None:
    """Listen, say where, and echo."""
    with socket.create_server((options.ip, 0)) as listener:
        say(address=listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            echo(connection, options.nbytes)


def run_client(options: argparse.Namespace) -> None:
    """Serve steps of one push and one pull."""
    nbytes = options.nbytes
    grads, weights = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    with socket.create_connection((options.ip, options.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def push() -> None:
            for cut in cuts(nbytes):
                connection.sendall(grads[cut])

        def step() -> None:
            sending = threading.Thread(target=push, name="push")
            sending.start()
            if receive(connection, weights) < nbytes:
                raise ConnectionError("the other side has hung up")
            sending.join()

        serve(step, lambda steps: -0.1 * steps)


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["server", "client"])
    parser.add_argument("--ip", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--nbytes", type=int, required=True)
    options = parser.parse_args()
    if options.side == "client":
        run_client(options)
    else:
        run_server(options)
        wait_for_end()


if __name__ == "__main__":
    main()
