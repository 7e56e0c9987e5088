"""Text to complete: short English sentences of the demo's own."""

from typing import Final

SENTENCES: Final = (
    "The ferry to the island leaves at nine.",
    "Rain is likely over the hills tonight.",
    "Please add two eggs and a cup of flour.",
    "A small library opened next to the mill.",
    "The last train was late by an hour.",
    "She keeps her maps in a wooden box.",
    "Our garden has three old apple trees.",
    "The bridge will be closed until May.",
    "He repaired the clock with a paper clip.",
    "Fresh bread is sold behind the church.",
    "The lighthouse keeper wrote every day.",
    "Two boats crossed the bay in the fog.",
    "The night shift begins after supper.",
    "Nobody knew who had painted the door.",
    "The museum shows maps of the old harbour.",
    "A fox slept under the garden shed.",
    "The recipe calls for salt and patience.",
    "They measured the river every morning.",
    "The choir sings on the first Sunday.",
    "Snow fell on the orchard in April.",
    "The ticket is valid for one journey.",
    "Her bicycle has a bell from Lisbon.",
    "The well in the square is very deep.",
    "Bring a lamp, the cellar has no light.",
)


def prompts(count: int) -> list[bytes]:
    """`count` different prompts."""
    rounds = (f" {number // len(SENTENCES) + 1}." for number in range(count))
    return [
        (SENTENCES[number % len(SENTENCES)] + (suffix if number >= len(SENTENCES) else "")).encode()
        for number, suffix in enumerate(rounds)
    ]
