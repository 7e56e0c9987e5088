"""Placements as values: rules, stored forms, the first one of a group, what deaths leave."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.errors import ExpertsLost, PlacementError
from elasticep.placement import (
    EMPTY,
    ONE,
    InvalidPlacement,
    Placement,
    SlotShortage,
    round_robin,
    without,
)


def geometry(layers=2, experts=6, slots=3, ranks=4):
    return SimpleNamespace(layers=layers, experts=experts, slots_per_rank=slots, max_ranks=ranks)


def changed(placement, **tables):
    """The placement with entries (layer, rank, slot) -> value written over."""
    copies = {
        "slot_expert": placement.slot_expert.copy(),
        "slot_weight": placement.slot_weight.copy(),
    }
    for name, entries in tables.items():
        for where, value in entries.items():
            copies[name][where] = value
    return Placement(experts=placement.experts, **copies)


def test_round_robin_covers_every_expert_twice_on_other_ranks_and_nodes():
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    placement = round_robin(geometry(), range(4), spare=1, nodes=nodes)
    placement.validate(geometry(), range(4))
    assert (placement.copies() == 2).all()
    for expert in range(6):
        holders = np.argwhere(placement.slot_expert[0] == expert)[:, 0]
        assert {nodes[int(rank)] for rank in holders} == {"a", "b"}


def test_round_robin_spreads_the_second_copies_of_a_rank():
    big = geometry(layers=1, experts=64, slots=16, ranks=8)
    placement = round_robin(big, range(8))
    mine = set(placement.slot_expert[0, 0, :8].tolist())
    helpers = {
        int(rank) for rank in range(1, 8) if mine & set(placement.slot_expert[0, rank].tolist())
    }
    assert len(helpers) >= 4


def test_round_robin_without_room_for_all_is_refused_by_name():
    with pytest.raises(SlotShortage, match=r"2 alive ranks \(1, 3\) have 6 slots for 7 experts, 1"):
        round_robin(geometry(experts=7), [3, 1])


@given(
    experts=st.integers(1, 40),
    ranks=st.integers(1, 12),
    slots=st.integers(1, 12),
    spare=st.integers(0, 3),
    node_count=st.integers(1, 4),
)
def test_round_robin_holds_its_rules(experts, ranks, slots, spare, node_count):
    sizes = geometry(1, experts, slots, ranks + 2)
    members = range(1, ranks + 1)
    nodes = {rank: f"n{rank % node_count}" for rank in members}
    if ranks * slots < experts:
        with pytest.raises(SlotShortage):
            round_robin(sizes, members, spare, nodes)
        return
    placement = round_robin(sizes, members, spare, nodes)
    placement.validate(sizes, members)
    assert placement.copies().max() <= 1 + spare
    if ranks * slots >= experts * (1 + spare) and ranks > 1 + spare:
        assert placement.copies().min() >= min(2, 1 + spare)


def test_case_08_sizes_that_do_not_divide():
    for ranks in (1, 2, 3, 5, 7):
        sizes = geometry(2, 384, 384 // ranks + 9, ranks)
        placement = round_robin(sizes, range(ranks))
        placement.validate(sizes, range(ranks))


def test_without_moves_no_byte_and_keeps_the_sums():
    sizes = geometry()
    placement = round_robin(sizes, range(4))
    left, lost = without(placement, [1])
    left.validate(sizes, [0, 2, 3])
    assert lost == []
    assert (left.slot_expert[:, 1] == EMPTY).all()
    for rank in (0, 2, 3):
        assert np.array_equal(left.slot_expert[:, rank], placement.slot_expert[:, rank])


def test_without_gives_tokens_to_copies_of_weight_zero():
    table = np.array([[[0], [0], [0]]], np.int32)
    weight = np.array([[[ONE], [0], [0]]], np.uint32)
    placement = Placement(experts=1, slot_expert=table, slot_weight=weight)
    left, lost = without(placement, [0])
    assert lost == []
    assert left.slot_weight[0, :, 0].tolist() == [0, ONE // 2, ONE // 2]


def test_without_names_what_is_lost():
    sizes = geometry(experts=6, slots=2, ranks=4)
    placement = round_robin(sizes, range(4), spare=0)
    left, lost = without(placement, [2])
    assert lost == [(layer, expert) for layer in range(2) for expert in (2,)]
    assert lost == left.lost_experts([0, 1, 3])
    with pytest.raises(ExpertsLost, match="layer 0 expert 2"):
        left.validate(sizes, [0, 1, 3])
    left.validate(sizes, [0, 1, 3], allow_lost=True)


def test_case_15_after_a_shrink_every_slot_keeps_what_it_holds():
    sizes = geometry(layers=3, experts=20, slots=8, ranks=6)
    placement = round_robin(sizes, range(6))
    left, _ = without(placement, [0, 5])
    stayed = left.slot_expert >= 0
    assert np.array_equal(left.slot_expert[stayed], placement.slot_expert[stayed])
    assert stayed[:, 1:5].sum() == (placement.slot_expert[:, 1:5] >= 0).sum()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"slot_expert": {(1, 2, 0): 6}}, "layer 1 rank 2 slot 0: an id outside"),
        ({"slot_expert": {(0, 0, 0): -2}}, "an id outside -1..5"),
        ({"slot_weight": {(0, 1, 1): ONE + 1}}, "a weight above 65536"),
        ({"slot_expert": {(0, 0, 0): EMPTY}}, "a weight above 0 on an empty slot"),
        ({"slot_weight": {(0, 0, 0): 7}}, r"layer 0 expert \d: the weights .* sum to 327\d\d, not"),
    ],
)
def test_a_broken_rule_is_named(entries, message):
    placement = round_robin(geometry(), range(4))
    with pytest.raises(InvalidPlacement, match=message):
        changed(placement, **entries).validate(geometry(), range(4))


def test_case_14_two_copies_on_one_rank_are_refused():
    placement = round_robin(geometry(), range(4))
    twice = placement.slot_expert[0, 0, 1]
    with pytest.raises(InvalidPlacement, match="two copies of an expert on one rank"):
        changed(placement, slot_expert={(0, 0, 2): twice}).validate(geometry(), range(4))


def test_slots_of_others_and_other_sizes_are_refused():
    placement = round_robin(geometry(), range(4))
    with pytest.raises(InvalidPlacement, match="rank 3 slot 0: an expert on a rank that is not"):
        placement.validate(geometry(), range(3))
    with pytest.raises(InvalidPlacement, match=r"the group has 6 and \(2, 5, 3\)"):
        placement.validate(geometry(ranks=5), range(4))
    with pytest.raises(InvalidPlacement, match="member 9 is outside"):
        placement.validate(geometry(), [9])


def test_tables_are_locked_and_typed():
    placement = round_robin(geometry(), range(4))
    with pytest.raises(ValueError, match="read-only"):
        placement.slot_expert[0, 0, 0] = 3
    with pytest.raises(InvalidPlacement, match="slot_expert is int64"):
        Placement(
            experts=1,
            slot_expert=np.zeros((1, 1, 1), np.int64),
            slot_weight=np.zeros((1, 1, 1), np.uint32),
        )
    assert issubclass(InvalidPlacement, PlacementError)


def test_stored_forms_come_back_equal_and_digests_tell_placements_apart():
    sizes = geometry(layers=3, experts=10, slots=4, ranks=5)
    placement = round_robin(sizes, [0, 1, 2, 4])
    assert Placement.from_bytes(placement.to_bytes()) == placement
    assert Placement.from_dict(placement.to_dict()) == placement
    assert Placement.from_tables(sizes, *placement.to_tables()) == placement
    other, _ = without(placement, [4])
    assert other != placement
    assert len({placement.digest(), other.digest()}) == 2
    assert hash(Placement.from_bytes(placement.to_bytes())) == hash(placement)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_typed_error(data):
    with pytest.raises(InvalidPlacement):
        Placement.from_bytes(data)


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_bytes_never_come_back_as_another_size(at, byte):
    whole = bytearray(round_robin(geometry(), range(4)).to_bytes())
    whole[at % len(whole)] = byte
    try:
        read = Placement.from_bytes(bytes(whole))
    except InvalidPlacement:
        return
    assert read.slot_expert.shape == read.slot_weight.shape


def test_a_small_message_cannot_ask_for_much_memory():
    header = round_robin(geometry(), range(4)).to_bytes()[:24]
    huge = header[:12] + b"\xff" * 12
    with pytest.raises(InvalidPlacement, match="a placement may have"):
        Placement.from_bytes(huge + b"x")


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"experts": 1, "slot_expert": [[[0.5]]], "slot_weight": [[[ONE]]]},
        {"experts": 1, "slot_expert": [[[0], [0, 0]]], "slot_weight": [[[ONE]]]},
        {"experts": 1, "slot_expert": [[[0]]], "slot_weight": [[[-1]]]},
        {"experts": 1, "slot_expert": [[[2**40]]], "slot_weight": [[[1]]]},
        {"experts": "x", "slot_expert": [[[0]]], "slot_weight": [[[1]]]},
    ],
)
def test_plain_forms_that_are_no_placement_are_refused(plain):
    with pytest.raises(InvalidPlacement):
        Placement.from_dict(plain)
