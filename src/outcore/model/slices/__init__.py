"""A batch through a block, or through the head and the loss, slice by slice."""
