"""tcgen05"""


def flush(unit):
    pass
