"""The command line: every command, and how errors end it."""

from __future__ import annotations

import sys

import typer

from autoplan.checking_commands import emit, verify
from autoplan.errors import AutoplanError
from autoplan.planning_commands import compare, dimensions, explain, plan
from autoplan.running_commands import profile, run

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Plan and run the training of a PyTorch model that does not fit.",
    pretty_exceptions_enable=False,
)
for command in (plan, profile, run, explain, compare, verify, emit, dimensions):
    app.command()(command)


def main() -> None:
    """Run the command line; an error of ours is one message on stderr and exit code 2."""
    try:
        app(standalone_mode=True)
    except (AutoplanError, ValueError) as error:
        typer.echo(f"autoplan: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
