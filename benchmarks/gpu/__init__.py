"""`make gpu`: what a machine with a card shows, in parts that can be ended at any moment and go on (docs/gpu.md).

`python -m benchmarks.gpu [--minutes N] [--out FOLDER] [--parts NAME ...]` measures; `python -m benchmarks.gpu report
FOLDER` draws the table and the pictures again. `plan.py` is the table of parts, `command.py` starts a process for each,
`work.py` is what such a process does, `results.py` is the file of rows; the other modules have the measurements.
"""
