"""Entry point of the console script ``vllm-yoco``.

A subcommand is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``. It is
imported when it is called or when the list of commands is printed, so it imports anything heavy inside ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from vllm_yoco import __version__
from vllm_yoco.config import flag_name

COMMANDS = {
    "inspect": "inspect",
    "cost": "cost",
    "check": "check",
    "error": "error",
    "bench": "bench",
    "demo": "demo",
    "init-model": "init_model",
}
"""Command -> module of ``vllm_yoco.tools``."""

USAGE_ERROR = 2
INTERRUPTED = 130


def build_parser(commands: Sequence[str]) -> argparse.ArgumentParser:
    """Parser that knows ``commands``, whose modules it imports."""
    parser = argparse.ArgumentParser(prog="vllm-yoco", description="Tools for YOCO prefill truncation.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        module = importlib.import_module(f"vllm_yoco.tools.{COMMANDS[command]}")
        subparser = subparsers.add_parser(command, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    A ValueError or OSError is the user's to fix: one line on stderr and exit code 2. VLLM_YOCO_DEBUG=1 lets it
    through with its traceback. Ctrl-C and SIGTERM end with one line and exit code 130. Wrong arguments exit through
    ``SystemExit(2)``, as always with argparse.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        build_parser(list(COMMANDS)).print_help(sys.stderr)
        return USAGE_ERROR
    called = argv[:1] if argv and argv[0] in COMMANDS else list(COMMANDS)
    args = build_parser(called).parse_args(argv)
    # So that engines end and temporary files go, as they do on Ctrl-C.
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, _interrupt) if in_main_thread else None
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("vllm-yoco: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if os.environ.get("VLLM_YOCO_DEBUG") == "1":
            raise
        # The commands' own flags are shorter than those of `vllm serve`.
        message = str(error).replace(flag_name("keep_tokens"), "--keep-tokens")
        print(f"vllm-yoco: error: {' '.join(message.split())}", file=sys.stderr)
        return USAGE_ERROR
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
