"""The update: rules and kernels, the optimizers users hold, clipping, scaling, and the order of updates."""
