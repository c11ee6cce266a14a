"""The command line: `outcore train` and `outcore generate`."""
