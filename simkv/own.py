"""Deprecated name of ``simkv.custom``: the same classes under their old names, for one version."""

from __future__ import annotations

import warnings
from multiprocessing import parent_process

from simkv import custom

_NEW_NAMES = {name: name for name in custom.__all__ if "Custom" not in name}
_NEW_NAMES |= custom.OLD_NAMES
globals().update({old: getattr(custom, new) for old, new in _NEW_NAMES.items()})

if parent_process() is None:  # worker processes import this module again; only their parent warns
    # The warning names no file, because Python would otherwise print the source line too.
    warnings.warn_explicit(
        "use simkv.custom (OwnScheduler is CustomScheduler there; see docs/changes-in-0.3.md); "
        "version 0.4 removes simkv.own",
        FutureWarning,
        "simkv.own",
        1,
    )
