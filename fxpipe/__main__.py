"""``python -m fxpipe`` is ``fxpipe``."""

from fxpipe.cli import main

raise SystemExit(main())
