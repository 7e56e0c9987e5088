"""What a run of the demo comes to: facts that are gathered while it goes on, and the judgement."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from elasticep.demo.display import Display
from elasticep.demo.journal import Assignment, Journal
from elasticep.demo.measure import KillWatch, steps_repeated
from elasticep.demo.report import Report
from elasticep.demo.settings import DemoSettings


@dataclass(slots=True)
class Facts:
    """What is counted on the way.

    Attributes:
        torn: (rank, step) of each torn step.
        replay_errors: rank -> answers that came out differently when they were run again.
        epochs: in which steps were complete.
        moved: requests that another rank took over.
        served_s: seconds from the first step to the last answer.
    """

    torn: list[tuple[int, int]] = field(default_factory=list)
    replay_errors: dict[int, int] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    moved: int = 0
    served_s: float = 0.0


def judge(
    settings: DemoSettings,
    model: Any,
    journal: Journal,
    facts: Facts,
    watch: KillWatch | None,
    ranks: Collection[int],
    display: Display,
    details: dict[str, Any],
) -> Report:
    """Compare with a single-process run of the same model.

    Args:
        settings: what was run.
        model: the model.
        journal: all requests and their answers.
        facts: what was counted.
        watch: of the kill, if there was one.
        ranks: that took part.
        display: where to say it.
        details: further figures for the report.
    """
    from elasticep.demo.reference import run_reference

    asked = [(entry.prompt, entry.max_new) for entry in journal.entries]
    different = list(dict.fromkeys(asked))  # the same question again has the same answer
    requests = [Assignment(n, prompt, (), new) for n, (prompt, new) in enumerate(different)]
    reference = run_reference(model, settings.sizes, requests, settings.length)
    numbers = [different.index(one) for one in asked]
    display.event("compared with a single-process run of the same model")
    differing = journal.differing(reference.tokens[number] for number in numbers)
    replay_errors = sum(facts.replay_errors.values())
    return Report(
        ranks=settings.ranks,
        nodes=settings.nodes,
        killed=settings.kill.value,
        detect_ms=watch.detect_ms if watch is not None else None,
        recover_ms=watch.recover_ms if watch is not None else None,
        steps_repeated=steps_repeated(facts.torn, watch.survivors if watch is not None else ranks),
        tokens_total=journal.tokens_total,
        tokens_identical=not differing and not replay_errors,
        requests_lost=journal.lost,
        epochs=sorted(facts.epochs),
        details={
            **details,
            "scenario": settings.scenario.value,
            "min_margin": reference.min_margin,
            "requests": len(journal.entries),
            "requests_moved": facts.moved,
            "requests_differing": differing,
            "logits_differing": journal.other_bits(reference.sums[number] for number in numbers),
            "replay_errors": replay_errors,
            "seconds_serving": round(facts.served_s, 3),
        },
    )
