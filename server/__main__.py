"""The `moed` command. Each command imports only what it needs, so that help comes at once."""

import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from moed.config.cli import Command, parse
from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, MoedError
from moed.config.settings import ServeSettings

if TYPE_CHECKING:
    from moed.dist.launch import LaunchEnvironment

logger = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line and leave with its exit code; a user's fault is one sentence."""
    open_standard_streams()
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except MoedError as error:
        logging.shutdown()
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
        case "models":
            from moed.moe.families import families_table

            print(families_table(), end="")
        case "plan":
            return _plan(command)
        case "place":
            from moed.server.place import place

            place(command.words)
        case "bench":
            from moed.server.bench.command import bench

            return bench(command.words)
        case "doctor":
            from moed.server.doctor.command import doctor

            assert command.settings is not None and command.doctor is not None
            return doctor(command.settings, command.doctor)
        case "healthcheck":
            from moed.server.healthcheck import healthcheck

            return healthcheck(command.words)
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


def _plan(command: Command) -> int:
    from moed.config.plan_text import full_json, full_text
    from moed.config.planning import plan_settings
    from moed.dist.registry import capabilities

    assert command.settings is not None and command.plan is not None
    full = plan_settings(command.settings, command.plan, capabilities())
    print(full_json(full) if command.plan.json else full_text(full), end="")
    return ConfigError.exit_code if full.plan.refusals else 0


def _serve(command: Command) -> int:
    from moed.config.environ import let_waiting_threads_sleep
    from moed.dist.launch import detect_torchrun
    from moed.server.logs import setup_logging

    assert command.settings is not None
    let_waiting_threads_sleep()
    setup_logging("launcher", command.settings.log_level, command.settings.log_format)
    settings, origins, environment = command.settings, command.origins, detect_torchrun()
    if environment is not None:
        return _serve_under_torchrun(settings, origins, environment)
    if settings.node_rank:
        from moed.server.node_launcher import serve_node, telling_others

        with telling_others(settings):
            return serve_node(_resolve(settings, origins, log=True))
    from moed.server.launcher import serve

    return serve(_resolve(settings, origins, log=True))


def _serve_under_torchrun(
    settings: ServeSettings, origins: Mapping[str, str], environment: "LaunchEnvironment"
) -> NoReturn:
    """Leaves with the exit code; what is wrong with the settings here, the other nodes hear too."""
    from moed.server.lifecycle import leave
    from moed.server.node_of_rank import tell_others
    from moed.server.torchrun import serve_under_torchrun, settings_under_torchrun

    try:
        settings, origins = settings_under_torchrun(settings, origins, environment)
        settings, origins = _within_torchrun(settings, origins, log=environment.rank == 0)
        config = _resolve(settings, origins, log=environment.rank == 0)
        leave(serve_under_torchrun(config, environment))
    except MoedError as error:
        logging.shutdown()
        print(f"moed: {error}", file=sys.stderr, flush=True)
        if not environment.is_single_node:
            tell_others(environment, 1, error)
        leave(error.exit_code)


def _within_torchrun(
    settings: ServeSettings, origins: Mapping[str, str], log: bool
) -> tuple[ServeSettings, Mapping[str, str]]:
    """A drain ends before torchrun's SIGKILL, however long it was meant to be."""
    from moed.dist.torchrun_patience import LEAVING_S, longest_drain_s, torchrun_patience_s

    asked, patience_s = settings.shutdown_timeout, torchrun_patience_s(sys.argv[1:])
    longest_s = longest_drain_s(patience_s)
    if asked <= longest_s:
        return settings, origins
    if log:
        logger.warning(
            "shutdown_timeout is %g s and not %g s: torchrun kills its workers %g s after SIGTERM; "
            "`torchrun --shutdown-timeout %g` gives open requests all their time",
            *(longest_s, asked, patience_s, math.ceil(asked + LEAVING_S)),
        )
    origins = {**origins, "shutdown_timeout": "torchrun"}
    return replace(settings, shutdown_timeout=longest_s), origins


def _resolve(settings: ServeSettings, origins: Mapping[str, str], log: bool) -> EngineConfig:
    """The configuration; what it costs goes into the log before anything is allocated."""
    from moed.config.plan import make_plan
    from moed.config.plan_text import launch_text
    from moed.config.resolve import resolve_and_explain
    from moed.config.show import explain
    from moed.dist.registry import capabilities

    found = resolve_and_explain(settings, capabilities(), weights=True)
    if log:
        plan = make_plan(found.config, found.machine, found.decided)
        logger.info("plan of each rank\n%s", launch_text(plan))
    return replace(found.config, explained=explain(settings, origins, found))


if __name__ == "__main__":
    main()
