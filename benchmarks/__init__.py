"""Benchmarks: each case a claim, each figure a ratio within one run.

``run.py`` finds and runs the cases, ``published.py`` is what the library is compared with. Like any user, they know the
library by its public names only. A new case is a new file in ``cases/``; ``frame.py`` says what it must hold.
"""
