"""Who answers what in the demo: nothing is lost, nothing comes twice, what is wrong is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticep.demo.batch import Batch
from elasticep.demo.journal import Assignment, Journal
from elasticep.demo.wire import assignment_fields, assignment_from
from elasticep.errors import UsageError

PROMPTS = [b"one", b"two", b"three", b"four", b"five"]


def next_token(tokens: list[int]) -> int:
    """Stands for the model: a token that hangs on the whole history."""
    return hash(tuple(tokens)) % 251


def step(batch: Batch, history: dict[int, list[int]], skip: bool = False) -> list[list[int]]:
    """One step of an engine: feed, and unless it is torn, advance."""
    feed = batch.feed()
    best = []
    for place, (token, position, active) in enumerate(
        zip(feed.tokens, feed.positions, feed.active, strict=True)
    ):
        seen = history.setdefault(place, [])
        del seen[position:]  # the cache is overwritten at this position
        seen.append(token)
        best.append(next_token(seen) if active else 0)
    if skip:
        return []
    return [[a.request, a.index, a.token] for a in batch.advance(best)]


def answer(prompt: bytes, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@given(
    rows=st.integers(1, 4),
    torn=st.lists(st.booleans(), max_size=60),
    death_after=st.integers(0, 40),
)
def test_requests_survive_torn_steps_and_a_death(
    rows: int, torn: list[bool], death_after: int
) -> None:
    journal = Journal(PROMPTS, 6, [0, 1, 2])
    batches = {rank: Batch(rows) for rank in (0, 1, 2)}
    caches: dict[int, dict[int, list[int]]] = {rank: {} for rank in batches}
    for rank, batch in batches.items():
        for assignment in journal.of(rank):
            batch.add(assignment)
    tears = iter(torn)
    for number in range(400):
        if journal.done:
            break
        if number == death_after:
            del batches[1]
            for heir, assignments in journal.take_over(1).items():
                for assignment in assignments:
                    batches[heir].add(assignment_from(assignment_fields(assignment)))
        for rank, batch in batches.items():
            for request, index, token in step(batch, caches[rank], skip=next(tears, False)):
                journal.record(rank, request, index, token)
    assert journal.done
    assert journal.lost == 0
    assert journal.tokens_total == 6 * len(PROMPTS)
    assert journal.differing([answer(prompt, 6) for prompt in PROMPTS]) == []
    assert all(batch.replay_errors == 0 for batch in batches.values())


def test_answers_that_are_not_those_of_the_reference_are_named() -> None:
    """Another token; the same tokens by other logits; one too few, which is a lost request."""
    journal = Journal(PROMPTS[:3], 2, [0])
    for request, tokens in enumerate(([5, 6], [7, 8], [9])):
        for index, token in enumerate(tokens):
            journal.record(0, request, index, token, 100 * request + index)
    tokens, sums = [[5, 6], [7, 8], [9, 10]], [[0, 1], [100, 101], [200, 201]]
    assert journal.lost == 1
    assert journal.differing(tokens) == [2]
    assert journal.differing([[5, 0], *tokens[1:]]) == [0, 2]
    assert journal.other_bits(sums) == [2]
    assert journal.other_bits([sums[0], [100, 0], sums[2]]) == [1, 2]


def test_replay_that_chooses_another_token_is_counted() -> None:
    batch = Batch(1)
    right = answer(b"one", 3)
    batch.add(Assignment(0, tuple(b"one"), (right[0], (right[1] + 1) % 251), 3))
    for _ in range(5):
        step(batch, {})
    assert batch.replay_errors >= 1


def test_feed_without_advance_is_the_same_feed() -> None:
    batch = Batch(2)
    batch.add(Assignment(0, (1, 2), (), 2))
    assert batch.feed() == batch.feed()
    assert batch.feed().count == 1
    assert batch.requests == 1


@pytest.mark.parametrize("record", [(1, 0, 0, 9), (0, 0, 1, 9), (0, 1, 0, 9)])
def test_journal_refuses_a_token_that_is_not_the_next_one(
    record: tuple[int, int, int, int],
) -> None:
    journal = Journal(PROMPTS, 2, [0, 1])
    with pytest.raises(UsageError, match="belongs to rank"):
        journal.record(*record)


def test_journal_refuses_a_token_beyond_the_end() -> None:
    journal = Journal(PROMPTS, 1, [0])
    journal.record(0, 0, 0, 5)
    with pytest.raises(UsageError, match="1 of 1 tokens"):
        journal.record(0, 0, 1, 5)


def test_take_over_goes_to_those_with_the_fewest() -> None:
    journal = Journal([b"x"] * 9, 1, [0, 1, 2])
    for request in (0, 3):
        journal.record(0, request, 0, 1)
    taken = journal.take_over(2)
    assert {heir: [a.request for a in moved] for heir, moved in taken.items()} == {0: [2, 5, 8]}
    assert journal.take_over(1).keys() == {0}
    assert journal.take_over(0) == {}
    assert journal.lost == 7
