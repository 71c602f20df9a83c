# The affdiv command: one small module a command.
