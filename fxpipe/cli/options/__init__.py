"""The options of the commands.  What is imported here is what their help needs: no torch."""
