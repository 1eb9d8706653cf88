"""The process in which a library's calls are made, away from the run: it has a time limit, and may hang, exit or use up memory.

`main` is its program. `problems` and `games` have the functions that it can call.
"""
