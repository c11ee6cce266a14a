"""Before the run: what it needs at least."""
