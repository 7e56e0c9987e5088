"""The rows of an engine's batch: which request, which token is fed next. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elasticep.demo.journal import Assignment


@dataclass(slots=True)
class _Row:
    request: int
    tokens: list[int]
    answer_from: int
    end: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """What one step feeds: a token and its position for each row, rows without a request masked."""

    tokens: list[int]
    positions: list[int]
    active: list[bool]

    @property
    def count(self) -> int:
        """Rows that hold a request."""
        return sum(self.active)


@dataclass(frozen=True, slots=True)
class Answer:
    """A token that a complete step produced: the `index`-th of the answer to `request`."""

    request: int
    index: int
    token: int
    row: int


class Batch:
    """A fixed number of rows, and requests that wait for one."""

    def __init__(self, rows: int) -> None:
        self._rows: list[_Row | None] = [None] * rows
        self._waiting: deque[Assignment] = deque()
        self.replay_errors = 0
        """Replayed tokens that the model would not have chosen; 0 unless something is wrong."""

    def add(self, assignment: Assignment) -> None:
        """Take a request; it starts, or is replayed, as soon as a row is free."""
        self._waiting.append(assignment)

    @property
    def requests(self) -> int:
        """Requests in a row or waiting."""
        return sum(row is not None for row in self._rows) + len(self._waiting)

    def feed(self) -> Feed:
        """The next step's input. Asking again without `advance` gives the same rows again."""
        for place, row in enumerate(self._rows):
            if row is None and self._waiting:
                new = self._waiting.popleft()
                self._rows[place] = _Row(
                    new.request,
                    [*new.prompt, *new.tokens],
                    len(new.prompt),
                    len(new.prompt) + new.max_new,
                )
        return Feed(
            [row.tokens[row.position] if row else 0 for row in self._rows],
            [row.position if row else 0 for row in self._rows],
            [row is not None for row in self._rows],
        )

    def advance(self, best: Sequence[int]) -> list[Answer]:
        """A step was complete: move every row on.

        Args:
            best: for each row the most likely token after the one that was fed.

        Returns:
            New tokens. Tokens that were replayed are compared and not returned again.
        """
        answers = []
        for place, row in enumerate(self._rows):
            if row is None:
                continue
            row.position += 1
            if row.position < len(row.tokens):
                replayed = row.position >= row.answer_from
                self.replay_errors += replayed and row.tokens[row.position] != best[place]
                continue
            row.tokens.append(best[place])
            index = row.position - row.answer_from
            answers.append(Answer(row.request, index, best[place], place))
            if len(row.tokens) == row.end:
                self._rows[place] = None
        return answers
