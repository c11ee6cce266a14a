"""What moves: the layout of parameters in chunks, a chunk's states, and the pool that holds them."""
