"""When things are needed: the recorded order of uses, the schedule drawn from it, and what a step allocates."""
