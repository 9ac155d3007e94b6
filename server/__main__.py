"""The `moed` command. Each command imports only what it needs, so that help comes at once."""

import os
import sys
from dataclasses import replace
from importlib.metadata import version

from moed.config.cli import Command, parse
from moed.config.errors import MoedError

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and leave with its exit code; a user's fault is one sentence."""
    open_standard_streams()
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except MoedError as error:
        print(f"moed: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def open_standard_streams() -> None:
    """Some supervisors start a process with its standard streams closed; the next files that it
    opened would take their numbers, and be closed or written to as if they were these.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def run(command: Command) -> int:
    """Returns the exit code. Raises `MoedError` for what a user can cause."""
    match command.name:
        case "help":
            print(command.text)
        case "version":
            print(f"moed {version('moed')}")
        case "config show":
            _show(command)
        case "serve":
            return _serve(command)
    return 0


def _show(command: Command) -> None:
    from moed.config.resolve import resolve_and_explain
    from moed.config.show import show
    from moed.dist.registry import capabilities

    assert command.settings is not None
    resolution = resolve_and_explain(command.settings, capabilities(), weights=False)
    print(show(command.settings, command.origins, resolution), end="")


def _serve(command: Command) -> int:
    from moed.config.resolve import resolve
    from moed.dist.launch import detect_torchrun
    from moed.dist.registry import capabilities
    from moed.server.logs import setup_logging

    assert command.settings is not None
    setup_logging("launcher", command.settings.log_level)
    settings, environment = command.settings, detect_torchrun()
    if environment is not None:
        from moed.server.torchrun import serve_under_torchrun

        if "data_parallel_size" not in command.origins:
            settings = replace(settings, data_parallel_size=environment.world_size)
        return serve_under_torchrun(resolve(settings, capabilities()), environment)
    from moed.server.launcher import serve

    return serve(resolve(settings, capabilities()))


if __name__ == "__main__":
    main()
