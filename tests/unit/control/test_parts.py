"""Who takes part in clocks and rounds: two-phase joins, stepping aside, restarts; the numbered list for servers."""

from __future__ import annotations

import pytest

from ps.consistency.policy import Ruling
from ps.control.api import Admitted, JobSettings
from ps.control.news import Seen
from ps.control.records import Options, Replay
from ps.control.rulings import KEPT, Rulings
from ps.errors import Refused
from ps.types import Incarnation, Part, Role
from tests.support.control import World

BSP = Options(servers=2, settings=JobSettings(consistency="bsp"))
SSP = Options(servers=2, settings=JobSettings(consistency="ssp:1"))


def told(world: World, server: Incarnation, worker: Incarnation) -> Admitted:
    """What the newest list says of a worker."""
    membership = world.state.news(server, Seen()).membership
    assert membership is not None
    return next(member for member in membership[1] if member.incarnation == worker)


def acknowledge(world: World, server: Incarnation, *entries: int) -> None:
    """A server has installed the newest list, and counts entering workers at these clocks."""
    version = world.state.news(server, Seen()).seen.membership
    world.state.installed(world.now, server, membership=version, entries=entries)
    world.check()


@pytest.mark.parametrize(("options", "clock"), [(BSP, 7), (SSP, 3)])
def test_a_joiners_first_clock_is_made_of_all_servers_entries(options: Options, clock: int) -> None:
    """Asked of all servers first, then told to all, and only then the worker may start. bsp: the first round that is
    open nowhere; ssp: beside the slowest."""
    world = World(options)
    one, two = world.server(), world.server()
    worker = world.worker()
    assert told(world, one, worker).part is Part.ENTERING
    acknowledge(world, one, 5, 7)
    assert told(world, one, worker).part is Part.ENTERING
    acknowledge(world, two, 3, 6)
    assert (told(world, one, worker).part, told(world, one, worker).clock) == (Part.IN, clock)
    acknowledge(world, one)
    assert world.state.known(worker) is None, "one server hasn't heard of the clock yet"
    acknowledge(world, two)
    assert world.state.known(worker) is not None


def test_in_asp_there_is_nothing_to_agree_on() -> None:
    """A worker is in with its first list."""
    world = World(Options(servers=1))
    server = world.server()
    worker = world.worker()
    assert told(world, server, worker).part is Part.IN
    acknowledge(world, server)
    assert world.state.known(worker) is not None


def test_workers_before_servers_begin_at_zero() -> None:
    """Any start order is fine."""
    world = World(BSP)
    worker = world.worker()
    server = world.server()
    assert (told(world, server, worker).part, told(world, server, worker).clock) == (Part.IN, 0)


def test_a_server_that_dies_is_not_waited_for() -> None:
    """The clock is made of the others' entries."""
    world = World(BSP)
    one, two = world.server(), world.server()
    worker = world.worker()
    acknowledge(world, one, 2, 2)
    world.leave(two)
    assert (told(world, one, worker).part, told(world, one, worker).clock) == (Part.IN, 2)


def test_stepping_aside_and_coming_back() -> None:
    """Out at once; back through the same two steps. Again is fine."""
    world = World(BSP)
    one, two = world.server(), world.server()
    worker = world.worker()
    for _ in range(2):
        acknowledge(world, one, 0, 0)
        acknowledge(world, two, 0, 0)
    for _ in range(2):
        world.state.take_part(world.now, worker, False)
        world.check()
        assert told(world, one, worker).part is Part.OUT
    for _ in range(2):
        world.state.take_part(world.now, worker, True)
        world.check()
        assert told(world, one, worker).part is Part.ENTERING
    acknowledge(world, one, 4, 4)
    acknowledge(world, two, 4, 5)
    assert told(world, one, worker).clock == 5


def test_while_data_is_held_back_for_a_common_start_nobody_steps_aside() -> None:
    """All that wait are to begin in the same round."""
    world = World(Options(servers=1, min_workers=2, settings=JobSettings(consistency="bsp")))
    server = world.server()
    worker = world.worker()
    acknowledge(world, server, 0, 0)
    world.state.take_part(world.now, worker, False)
    assert told(world, server, worker).part is Part.IN
    world.worker()
    world.state.take_part(world.now, worker, False)
    assert told(world, server, worker).part is Part.OUT


def test_only_live_workers_take_part() -> None:
    """Servers don't, nor workers that have not announced themselves."""
    world = World(BSP)
    with pytest.raises(Refused, match="takes no part"):
        world.state.take_part(world.now, world.server(), True)
    with pytest.raises(Refused, match="takes no part"):
        world.state.take_part(world.now, world.join(Role.WORKER).incarnation, True)


def test_a_restarted_coordinator_leaves_clocks_to_servers() -> None:
    """It doesn't know who had stepped aside; a worker on its way in asks again, and is asked about again."""
    world = World(BSP)
    server = world.server()
    worker = world.worker()
    records = [record for record in world.records if type(record).__name__ == "MemberRecord"]
    newest = {record.incarnation: record for record in records}  # type: ignore[union-attr]
    again = World(BSP, Replay(generation=2, reserved_end=65, members=list(newest.values())))  # type: ignore[arg-type]
    assert told(again, server, worker).part is Part.KEPT
    again.state.ready(again.now, worker, "")
    assert told(again, server, worker).part is Part.ENTERING


def test_rulings_reach_all_servers_once_in_the_order_they_came() -> None:
    """Those that a session has heard are not told again; a new session hears all that are kept."""
    world = World(BSP)
    one, two = world.server(), world.server()
    first, second = Ruling(1, ((Incarnation(9), 4),)), Ruling(0, dropped=((Incarnation(9), 3),))
    world.state.rule(world.now, one, (first,))
    seen = world.state.news(two, Seen()).seen
    world.state.rule(world.now, one, (first, second))
    assert world.state.news(two, seen).rulings == (second,)
    assert world.state.news(two, Seen()).rulings == (first, second)
    assert world.state.news(world.worker(), Seen()).rulings == ()
    with pytest.raises(Refused, match="decides nothing"):
        world.state.rule(world.now, world.worker(), (first,))


def test_old_rulings_are_forgotten() -> None:
    """The table is bounded."""
    rulings = Rulings()
    for number in range(KEPT + 10):
        assert rulings.add((Ruling(number),))
    assert len(rulings.since(0)) == KEPT and rulings.since(rulings.end - 2)[0].number == KEPT + 8
    assert not rulings.add((Ruling(KEPT),))
