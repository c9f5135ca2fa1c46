"""Entry point of ``python -m simkv.cli``."""

from simkv.cli import main

main()
