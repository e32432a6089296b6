"""The ranks of a world, tested as users see them: by what a program does, along every path that its bytes can take.

What parts promise to each other is tested in `tests/runtime`, and what differs in virtual time in `tests/simulation`.
"""
