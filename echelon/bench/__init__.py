"""Micro-benchmarks of messages and collectives: `echelon bench`.

One engine (`engine.py`) times, checks and reports; an operation is one small file in `operations/`. What calls it is a
carrier (`carriers.py`), what it moves is a buffer (`buffers.py`). Names, sizes, iterations and the form of the output
are those of the OSU micro-benchmarks, so that scripts which read those read these.
"""
