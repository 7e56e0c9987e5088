"""What was asked and what was answered: the one thing that a dead engine must not take with it.

Pure: no clock, no I/O. The parent process keeps it; tokens enter only from complete steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elasticep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request for an engine, from its start or from where another engine left it.

    Attributes:
        request: its number.
        prompt: byte tokens.
        tokens: tokens answered so far; they are replayed, not produced anew.
        max_new: tokens to answer in all.
    """

    request: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    max_new: int


@dataclass(slots=True)
class Entry:
    """One request in the journal."""

    prompt: tuple[int, ...]
    max_new: int
    rank: int
    tokens: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)
    moves: int = 0

    @property
    def done(self) -> bool:
        """Whether the answer is whole."""
        return len(self.tokens) >= self.max_new


class Journal:
    """All requests of a run.

    Args:
        prompts: byte tokens of each request.
        max_new: tokens to answer to each.
        ranks: the ranks that serve them; requests are dealt out in turn.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], max_new: int, ranks: Sequence[int]
    ) -> None:
        self.entries = [
            Entry(tuple(prompt), max_new, ranks[number % len(ranks)])
            for number, prompt in enumerate(prompts)
        ]
        self._alive = set(ranks)

    def add(self, prompts: Sequence[Sequence[int]], max_new: int, rank: int) -> list[Assignment]:
        """New requests for a rank that joins, or joins again."""
        self._alive.add(rank)
        first = len(self.entries)
        self.entries += [Entry(tuple(prompt), max_new, rank) for prompt in prompts]
        return [a for a in self.of(rank) if a.request >= first]

    @property
    def done(self) -> bool:
        """Whether every answer is whole."""
        return all(entry.done for entry in self.entries)

    @property
    def lost(self) -> int:
        """Requests without a whole answer."""
        return sum(not entry.done for entry in self.entries)

    @property
    def tokens_total(self) -> int:
        """Tokens answered so far, all requests together."""
        return sum(len(entry.tokens) for entry in self.entries)

    def of(self, rank: int) -> list[Assignment]:
        """Unfinished requests of a rank."""
        return [
            Assignment(number, entry.prompt, tuple(entry.tokens), entry.max_new)
            for number, entry in enumerate(self.entries)
            if entry.rank == rank and not entry.done
        ]

    def record(self, rank: int, request: int, index: int, token: int, logits: int = 0) -> None:
        """Take a token from a complete step, and a sum over the logits it was chosen from.

        Raises:
            UsageError: it is not the next token of a request of this rank. An engine that says so
                broke the rule that nothing of a torn step is released.
        """
        entry = self.entries[request]
        if entry.rank != rank or index != len(entry.tokens) or entry.done:
            raise UsageError(
                f"rank {rank} answered token {index} of request {request}, which belongs to rank "
                f"{entry.rank} and has {len(entry.tokens)} of {entry.max_new} tokens"
            )
        entry.tokens.append(token)
        entry.sums.append(logits)

    def take_over(self, dead: int) -> dict[int, list[Assignment]]:
        """Give a dead rank's unfinished requests to those who have the fewest.

        Returns:
            What each survivor takes over. Empty if nobody is left or there was nothing.
        """
        self._alive.discard(dead)
        if not self._alive:
            return {}
        load = {rank: len(self.of(rank)) for rank in sorted(self._alive)}
        taken: dict[int, list[Assignment]] = {}
        for assignment in self.of(dead):
            heir = min(load, key=lambda rank: (load[rank], rank))
            load[heir] += 1
            entry = self.entries[assignment.request]
            entry.rank = heir
            entry.moves += 1
            taken.setdefault(heir, []).append(assignment)
        return taken

    def differing(self, reference: Iterable[Sequence[int]]) -> list[int]:
        """Requests whose tokens are not those of the reference run."""
        pairs = zip(self.entries, reference, strict=True)
        return [n for n, (entry, right) in enumerate(pairs) if entry.tokens != list(right)]

    def other_bits(self, reference: Iterable[Sequence[int]]) -> list[int]:
        """Requests whose logits are not those of the reference run, to the bit."""
        pairs = zip(self.entries, reference, strict=True)
        return [n for n, (entry, right) in enumerate(pairs) if entry.sums != list(right)]
