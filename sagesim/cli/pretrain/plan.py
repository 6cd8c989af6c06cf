"""x"""

HELP = "x"


def add(p): ...
