"""The command line: ``fxpipe …``, one file a subcommand."""

from fxpipe.cli.command import main

__all__ = ["main"]
