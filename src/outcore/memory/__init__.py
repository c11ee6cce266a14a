"""Where bytes live: device, host and disk, and what each of them may hold.

`sizes` reads and writes sizes, `budget` says what a run may use, `host` is memory at addresses that never
change, `blockfile` is the seam to the file system, `disk` is the tier above it, `ledger` counts.
"""
