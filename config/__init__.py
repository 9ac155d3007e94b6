"""What the user may set, and `resolve()`, which turns it into one frozen `EngineConfig`.

Nothing here imports torch: `moed --help` and `moed config show` start in a fraction of a second.
"""
