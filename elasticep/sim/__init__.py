"""A deterministic simulator: the real control code among simulated nodes, ranks, store and clocks.

Nothing in it reads a clock, a file or the network; one seed decides everything.
"""

from elasticep.sim.plants import Plant
from elasticep.sim.run import Result, Scenario, run, run_many

__all__ = ["Plant", "Result", "Scenario", "run", "run_many"]
