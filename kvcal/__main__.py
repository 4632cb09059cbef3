"""``python -m kvcal``."""

from kvcal.cli import main

main()
