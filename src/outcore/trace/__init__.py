"""When things are needed: the recorded order of uses, the schedule from it, and what a step allocates."""
