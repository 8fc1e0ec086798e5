"""The desk that is looked at: replicas are asked once for everybody, and none that hangs or is gone keeps anybody waiting."""

from dragoman.server.dispatch.watch_desk import PATIENCE_SECONDS, SHORTEST_SECONDS
from dragoman.server.engine.messages import Report, Request, Share
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, SlotUse, Snapshot
from tests.server.dispatch.fakes import FakeDesk, FakeFrontEnd, FakeReplica


def snapshot(number: int = 7, at: float = 1.0) -> Snapshot:
    return Snapshot([EngineSnapshot(at, [SlotUse(0, number, False, 2, 1, 9)])], [CallerUse("alice", 0, 1)])


def test_all_replicas_are_told_of_together_and_with_what_waits_here() -> None:
    desk = FakeDesk(slots=1)
    replicas = [FakeReplica(desk, index, 1) for index in range(2)]
    front = FakeFrontEnd(desk)
    front.submit(*(Request(number, [5, 1], 9, 0.0, share=Share("alice")) for number in range(9)))
    num_given = sum(len(replica.requests) for replica in replicas)
    front.watch()
    replicas[1].show(snapshot(1))
    assert front.snapshots == []
    replicas[0].show(snapshot(0))
    [told] = front.snapshots
    assert [(engine.replica, engine.slots[0].request) for engine in told.engines] == [(0, 0), (1, 1)]
    assert told.callers == [CallerUse("alice", 9 - num_given, 2)]


def test_replicas_are_asked_only_while_somebody_looks_and_once_for_all_who_do() -> None:
    desk = FakeDesk()
    replicas = [FakeReplica(desk, index, 4) for index in range(2)]
    fronts = [FakeFrontEnd(desk, f"front-{i}".encode()) for i in range(5)]
    assert [replica.num_watches for replica in replicas] == [0, 0]
    for front in fronts:
        front.watch()
    for replica in replicas:
        replica.show(snapshot())
    for front in fronts:
        front.watch()
        front.watch()
    assert [replica.num_watches for replica in replicas] == [1, 1]
    assert {len(front.snapshots) for front in fronts} == {3}, "what they have just said is good enough for whoever asks again"
    desk.clock.now += SHORTEST_SECONDS
    fronts[0].watch()
    assert [replica.num_watches for replica in replicas] == [2, 2]


def test_looking_changes_nothing_that_anybody_is_told() -> None:
    desk = FakeDesk()
    replica, front = FakeReplica(desk, 0, 4), FakeFrontEnd(desk)
    num_reports = len(front.reports)
    for _ in range(3):
        front.watch()
        replica.show(snapshot())
    assert len(front.reports) == num_reports and not any(isinstance(event, Report) for event in front.events[-3:])


def test_a_replica_that_hangs_holds_up_nobody_and_is_not_asked_again() -> None:
    desk = FakeDesk()
    replicas = [FakeReplica(desk, index, 4) for index in range(2)]
    front = FakeFrontEnd(desk)
    front.watch()
    replicas[0].show(snapshot())
    desk.wait(0)
    assert front.snapshots == []
    desk.wait(PATIENCE_SECONDS)
    assert [engine.replica for engine in front.snapshots[0].engines] == [0]
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    replicas[0].show(snapshot(8, at=2.0))
    assert [engine.at for engine in front.snapshots[1].engines] == [2.0]
    assert [replica.num_watches for replica in replicas] == [2, 1]
    replicas[1].show(snapshot(9))
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    assert [replica.num_watches for replica in replicas] == [3, 2]


def test_a_replica_that_is_lost_is_told_of_no_more_and_one_that_is_back_is_asked_anew() -> None:
    desk = FakeDesk()
    replicas = [FakeReplica(desk, index, 4) for index in range(2)]
    front = FakeFrontEnd(desk)
    front.watch()
    replicas[0].show(snapshot())
    replicas[1].lose()
    assert [engine.replica for engine in front.snapshots[0].engines] == [0]
    replicas[1].show(snapshot())
    replicas[1].open()
    desk.clock.now += SHORTEST_SECONDS
    front.watch()
    assert replicas[1].num_watches == 2
    for replica in replicas:
        replica.show(snapshot())
    assert [engine.replica for engine in front.snapshots[1].engines] == [0, 1]


def test_without_replicas_there_is_nothing_to_see_and_nobody_waits() -> None:
    front = FakeFrontEnd(FakeDesk())
    front.watch()
    assert front.snapshots == [Snapshot([], [])]


def test_a_front_end_that_is_gone_is_told_nothing() -> None:
    desk = FakeDesk()
    replica, front = FakeReplica(desk, 0, 4), FakeFrontEnd(desk)
    front.watch()
    desk.detach(b"front")
    replica.show(snapshot())
    assert front.snapshots == []
    front.watch()
    assert front.snapshots == []
