"""The learning rate of a step: a linear warm-up to its peak, and then what the schedule's kind says.

Counted in updates done: the last step of the warm-up has the peak, the last step of all what the schedule leaves at
the end. `cosine` falls all the way between the two, `wsd` (warm-up, stable, decay) stays and falls linearly in the last
share of the steps, `constant` stays.
"""

from __future__ import annotations

import math

from echelon.train.config import Schedule


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """For the step with this number (from 0) of so many."""
    done = step + 1
    if done < schedule.warmup:
        return peak * done / schedule.warmup
    if schedule.kind == "constant":
        return peak
    falls_from = schedule.warmup
    if schedule.kind == "wsd":
        falls_from = max(steps - round(schedule.decay * steps), falls_from)
    fallen = min(max((done - falls_from) / max(steps - falls_from, 1), 0.0), 1.0)
    if schedule.kind == "cosine":
        fallen = (1 - math.cos(math.pi * fallen)) / 2
    return peak * (1 - fallen * (1 - schedule.floor))
