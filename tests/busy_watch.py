"""``python -m busy_watch`` is ``python -m fxpipe`` whose watch for failures never pauses.

The process ends in the middle of a look at the store.
"""

import runpy

import fxpipe.runtime.job.watch

fxpipe.runtime.job.watch.BEAT = 0.0
runpy.run_module("fxpipe", run_name="__main__", alter_sys=True)
