"""Whose bytes: sharding and collectives on torch.distributed. One rank has nothing to do here."""
