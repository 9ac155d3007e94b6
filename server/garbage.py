"""How often a process looks for garbage that holds itself in cycles."""

import gc

# Objects made and not freed between two looks, and looks between those at older objects. A stream's
# tokens make many that are freed later, and no cycles; Python's own 700 look through them for
# nothing, at a fifth of the front end's time for an event.
THRESHOLDS = (10_000, 10, 10)


def look_seldom() -> None:
    """What is there now stays until the end, and is not looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
