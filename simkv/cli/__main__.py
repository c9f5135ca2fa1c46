"""``python -m simkv.cli``."""

from simkv.cli import main

main()
