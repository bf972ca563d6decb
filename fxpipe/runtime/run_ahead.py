"""How far the host of a rank runs ahead of its device; apart, as the deadlock proof uses it without torch."""

#: Ops that a host starts before it waits for the first of them to be over.  Enough to hide the host; more
#: would hold the messages of all those ops in memory, which is free only when their streams are seen to be.
RUN_AHEAD = 4
