"""What survives: the format of checkpoints, save, load, a series of them, and export."""
