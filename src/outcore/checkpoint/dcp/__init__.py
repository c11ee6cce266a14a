"""torch.distributed.checkpoint in both directions, without running anything that a file says."""
