"""Policies of a running group: what they may be, that they hold, and that nothing forgets them."""

from dataclasses import replace

import pytest

from elasticep.balance import RebalancePolicy
from elasticep.control import events as ev
from elasticep.control import records
from elasticep.control.records import Moment
from elasticep.control.seats import Phase
from elasticep.control.store import KeyValue, Put
from elasticep.errors import ConfigError
from elasticep.group import LostExperts
from elasticep.policies import Policies, change_from_text
from elasticep.proto import controller_pb2
from elasticep.testing.membership import World, group_config

TWO_NODES = {"a": (0, 1), "b": (2, 3)}


def formed(**config: object) -> World:
    """Four ranks on two nodes, in epoch 1."""
    world = World(group_config(**{"flap_limit": 0, **config}), TWO_NODES)  # type: ignore[arg-type]
    world.settle()
    return world


def change(world: World, **settings: str) -> Policies:
    """What an operator types, taken by the group."""
    policies = world.membership.policies.changed(change_from_text(settings))
    world.feed(ev.SetPolicies(policies))
    world.run()
    return policies


def test_a_change_keeps_what_it_does_not_name() -> None:
    config = group_config(min_ranks=2)
    policies = Policies.of(config)
    same = policies.changed(controller_pb2.GroupPolicies())
    assert same == policies
    changed = policies.changed(change_from_text({"renormalise": "true", "flap_limit": "0"}))
    assert changed.to_dict() == {**policies.to_dict(), "renormalise": True, "flap_limit": 0}
    assert Policies.from_proto(changed.to_proto()) == changed
    assert Policies.from_dict(changed.to_dict(), config) == changed
    moved = policies.changed(change_from_text({"rebalance.target": "1.2", "staging_slots": "1"}))
    settings = replace(policies.rebalance, target=1.2)
    assert moved == replace(policies, rebalance=settings, staging_slots=1)
    assert Policies.from_proto(moved.to_proto()) == moved
    assert Policies.from_dict(moved.to_dict(), config) == moved


def test_what_an_older_controller_stored_is_read_and_the_rest_is_as_the_config_says() -> None:
    settings = RebalancePolicy(target=1.5, automatic=False)
    config = group_config(spare_copies=0, rebalance=settings)
    older = {name: Policies.of(config).to_dict()[name] for name in ("min_ranks", "flap_limit")}
    older |= {"lost_experts": "serve", "renormalise": True, "flap_window_ms": 5_000}
    read = Policies.from_dict(older, config)
    assert (read.lost_experts, read.flap_window_ms) == (LostExperts.SERVE, 5_000)
    assert (read.spare_copies, read.rebalance) == (0, settings)
    partly = Policies.from_dict({**older, "rebalance": {"target": 1.1}}, config)
    assert partly.rebalance == replace(settings, target=1.1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"min_rank": "1"}, "there is no policy 'min_rank'; known are min_ranks, lost_experts"),
        ({"min_ranks": "many"}, "min_ranks is 'many'; it must be a whole number"),
        ({"renormalise": "1"}, "renormalise is '1'; it must be true or false"),
        ({"lost_experts": "drop"}, "lost_experts is 'drop'; use one of refuse, serve"),
        ({"min_ranks": "5"}, "min_ranks is 5; it must be 1 to 4"),
        ({"min_ranks": "0"}, "min_ranks is 0; it must be 1 to 4"),
        ({"flap_limit": "1001"}, "flap_limit is 1001"),
        ({"flap_window_ms": "999"}, "flap_window_ms is 999; it must be 1000 to 86400000"),
        ({"spare_copies": "4"}, "spare_copies is 4; it must be 0 to 3"),
        ({"staging_slots": "4"}, "staging_slots is 4; it must be 0 to 3"),
        ({"spare_copies": "9999999999"}, "spare_copies is 9999999999, which is more than can be"),
        ({"rebalance": "1"}, "there is no policy 'rebalance'; known are .*rebalance.target"),
        ({"rebalance.target": "low"}, "rebalance.target is 'low'; it must be a number"),
        ({"rebalance.target": "nan"}, "rebalance.target is nan; it must be a number from 1.0"),
        ({"rebalance.min_gain": "-1"}, "rebalance.min_gain is -1.0; it must be a number from 0.0"),
        ({"rebalance.automatic": "no"}, "rebalance.automatic is 'no'; it must be true or false"),
        ({"rebalance.window_ms": "9"}, "rebalance.window_ms is 9; it must be a whole number from"),
        ({"rebalance.groups": "5"}, "do not divide into 5 groups; change rebalance.groups"),
    ],
)
def test_what_cannot_be_is_refused_and_named(settings: dict[str, str], text: str) -> None:
    config = group_config()
    with pytest.raises(ConfigError, match=text):
        Policies.of(config).changed(change_from_text(settings)).apply(config)


def test_every_node_is_told_at_its_hello_and_after_each_change() -> None:
    world = formed()
    assert world.told == dict.fromkeys("ab", Policies.of(world.config))
    policies = change(world, lost_experts="serve", renormalise="true")
    assert world.told == dict.fromkeys("ab", policies)
    (notice,) = [n for n in world.notices if n.event == "policies.changed"]
    assert notice.fields == {"changed": {"lost_experts": "serve", "renormalise": True}}
    world.told.clear()
    world.restart_controller()
    world.run()
    assert world.told == dict.fromkeys("ab", policies), "the next leader knows"
    assert world.membership.policies == policies


def test_min_ranks_holds_from_the_change_on_and_under_the_next_leader() -> None:
    world = formed()
    change(world, min_ranks="4")
    world.restart_controller()
    world.attach = False
    world.kill(3)
    world.settle()
    assert world.view.epoch == 1
    assert "min_ranks is 4" in world.membership.waiting
    change(world, min_ranks="3")
    assert world.view.ranks == (0, 1, 2), "the change lets the waiting view come"


def test_lost_experts_are_served_from_the_change_on() -> None:
    world = formed(spare_copies=0)
    change(world, lost_experts="serve")
    world.kill(3)
    assert world.view.lost, "the survivors go on first"
    assert world.membership.config.lost_experts is LostExperts.REFUSE, "as it was created"


def test_readmission_can_be_made_manual_and_automatic_again() -> None:
    world = formed()
    change(world, manual_readmission="true")
    world.kill(3)
    world.settle()
    assert "until an operator lets it in" in world.membership.seats[3].held
    change(world, manual_readmission="false")
    assert world.membership.seats[3].held, "whoever waits for a person still does"
    world.feed(ev.Undrain((3,)))
    world.settle()
    world.kill(2)
    world.settle()
    assert world.view.ranks == (0, 1, 2, 3)


def test_flap_damping_takes_limit_and_window_from_the_policies() -> None:
    world = formed()
    change(world, flap_limit="2", flap_window_ms="60000")
    for _ in range(3):  # too far apart
        world.kill(3)
        world.settle()
        world.advance(61_000, step_ms=10_000)
    assert not world.membership.seats[3].held
    for _ in range(2):
        world.kill(3)
        world.settle()
    assert world.membership.seats[3].held.startswith("ended 2 times in 60 seconds")


def test_ends_are_counted_on_over_changes_of_the_leader() -> None:
    world = formed(flap_limit=3)
    for _ in range(3):
        world.kill(3, "ECC error")
        world.settle()
        world.restart_controller()
        world.settle()
    assert world.membership.seats[3].phase is Phase.GONE
    assert world.membership.seats[3].held.startswith("ended 3 times in 10 minutes")


# ---- the store


def stored(write: ev.Write, at: Moment) -> KeyValue:
    (put,) = records.operations("g", write, at)
    assert isinstance(put, Put)
    return KeyValue(put.key, put.value, 1, 1)


def test_ends_are_stored_in_a_time_that_every_leader_reads() -> None:
    seat = ev.SaveSeat(3, 2, "b", "gone", 1, "", "", ended_ms=(9_000, 10_000))
    item = stored(seat, Moment(now_ms=10_500, unix_ms=1_000_010_500))
    config = records.put_config(group_config())
    items = [KeyValue(config.key, config.value, 1, 1), item]
    # The next leader's clock began elsewhere, and half a minute has passed.
    loaded = records.load(items, Moment(now_ms=77_000, unix_ms=1_000_040_500))
    (read,) = loaded.groups["g"][1].seats
    assert read.ended_ms == (77_000 - 31_500, 77_000 - 30_500)
    # A host whose clock is behind does not see ends in the future.
    loaded = records.load(items, Moment(now_ms=77_000, unix_ms=1_000_000_000))
    assert loaded.groups["g"][1].seats[0].ended_ms == (77_000, 77_000)


def test_policies_are_stored_and_what_cannot_be_is_named() -> None:
    config = records.put_config(group_config())
    at = Moment(1, 2)
    policies = Policies(
        min_ranks=2,
        lost_experts=LostExperts.SERVE,
        renormalise=True,
        manual_readmission=True,
        flap_limit=7,
        flap_window_ms=5_000,
    )
    first = KeyValue(config.key, config.value, 1, 1)
    item = stored(ev.SavePolicies(policies), at)
    assert records.load([first, item], at).groups["g"][1].policies == policies
    broken = item.value.replace(b'"serve"', b'"sever"')
    for content in (broken, b"[1]", b'"serve"', b"\xff"):
        with pytest.raises(records.StoreCorrupt, match="groups/g/policies cannot be read"):
            records.load([first, KeyValue(item.key, content, 1, 1)], at)


def test_what_a_later_version_wrote_beside_is_left_alone() -> None:
    """Controllers are upgraded one by one; one that is not yet may lead after one that is."""
    config, at = records.put_config(group_config()), Moment(1, 2)
    policies = replace(Policies.of(group_config()), flap_limit=7)
    seat = ev.SaveSeat(0, 3, "a", "active", 5, "", "", (1,))
    paused = ev.SaveRebalance("audit", "", b"", held=True)
    items = [KeyValue(config.key, config.value, 1, 1)]
    for write in (ev.SavePolicies(policies), seat, paused):
        item = stored(write, at)
        later = item.value.replace(b"{", b'{"news":{"of":2},', 1)
        later = later.replace(b'"rebalance":{', b'"rebalance":{"news":1,')
        items.append(KeyValue(item.key, later, 1, 1))
    saved = records.load(items, at).groups["g"][1]
    assert (saved.policies, saved.seats, saved.rebalance) == (policies, (seat,), paused)
