"""The module: units and their hooks, what activations cost, and how weights come in and out."""
