"""A worker's line to a real job: gRPC to the coordinator, torch RPC to the servers."""

from __future__ import annotations

from ps import net
from ps.control.api import Joined
from ps.control.client import GrpcControl
from ps.rpc.agent import open_rpc
from ps.rpc.transport import Transport
from workers.config import WorkerConfig


class Cluster:
    """`Backend` for a job with a coordinator. RPC starts only when a model is attached."""

    alone = False

    def __init__(self, config: WorkerConfig) -> None:
        assert config.coordinator is not None
        self._config = config
        self._host = config.coordinator.host
        self.control = GrpcControl(config.coordinator)

    def open_transport(self, joined: Joined) -> Transport:
        """Start this process's RPC agent. Raises `AddressError` when its address can't be used."""
        config, settings = self._config, joined.settings
        ip = net.own_address(self._host, advertise=config.advertise, interface=config.interface)
        return open_rpc(
            incarnation=joined.incarnation,
            name=joined.name,
            host_ip=ip,
            interface=config.interface,
            transports=settings.transports,
            channels=settings.channels,
            rpc_threads=config.rpc_threads,
        )

    def close(self) -> None:
        """Nothing of its own: the worker closes its control client and its transport."""
