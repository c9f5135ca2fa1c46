"""Old spelling of ``simkv.custom``, for one version: the same classes under their old names."""

from __future__ import annotations

import warnings
from multiprocessing import parent_process

from simkv import custom

_NEW_NAMES = {name: name for name in custom.__all__ if "Custom" not in name}
_NEW_NAMES |= custom.OLD_NAMES
globals().update({old: getattr(custom, new) for old, new in _NEW_NAMES.items()})

if parent_process() is None:  # a worker repeats what its parent has imported
    # No file is given, so that Python does not print a second line with its source.
    warnings.warn_explicit(
        "use simkv.custom (OwnScheduler is CustomScheduler there; see docs/changes-in-0.3.md); "
        "version 0.4 removes simkv.own",
        FutureWarning,
        "simkv.own",
        1,
    )
