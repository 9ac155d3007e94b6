"""The errors that a user can cause, each with the exit code that a supervisor reads (sysexits)."""

EXIT_CODES = {
    "0": "done; after SIGTERM: open requests have finished, or were told of the end",
    "1": "moed healthcheck, doctor, bench: the answer is no",
    "64": "a command line that cannot be read",
    "65": "a checkpoint that is missing, damaged, or of a family that is not served",
    "69": "another rank went away",
    "70": "a process died, or a fault of moed's own",
    "78": "settings that cannot work, here or together, or differ between ranks",
    "130, 143": "stopped at once: Ctrl-C or SIGTERM, while starting or a second time",
}


class MoedError(Exception):
    """A fault outside our code, with a message that says what was given, what is allowed, what to
    do.
    """

    exit_code = 70


class ConfigError(MoedError):
    """Settings that cannot work: unknown, malformed, or in conflict."""

    exit_code = 78


class UsageError(ConfigError):
    """A command line that cannot be read."""

    exit_code = 64


class ModelError(MoedError):
    """A checkpoint that is missing, corrupt, or of a family that is not served."""

    exit_code = 65


class RankMismatch(MoedError):
    """Ranks that should agree do not; the message names the key and the value of each rank."""

    exit_code = 78


class PeerLost(MoedError):
    """A collective failed because another rank went away: the consequence, never the cause."""

    exit_code = 69


class TokenBudgetExceeded(MoedError):
    """More rows reached a MoE layer than B; refused before any collective."""
