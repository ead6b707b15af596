"""``python -m hookbus`` is the command ``hookbus``."""

from __future__ import annotations

from hookbus.cli.app import run

if __name__ == "__main__":
    run()
