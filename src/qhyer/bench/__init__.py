"""`qhyer bench NAME`: how fast, and how far from what the machine could do.

One file per benchmark; what they share is in `common`. Each fills `BenchRow`s, computes its own floor in the same run,
prints a small table and, with `--out`, writes JSON.
"""
