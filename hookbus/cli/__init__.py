"""The command line: one file a command. Nothing here imports torch but ``plugins``."""
