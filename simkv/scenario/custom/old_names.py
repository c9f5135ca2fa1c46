"""Old names of the classes that custom schedulers import."""

#: Names of ``simkv.own`` and those of ``simkv.custom``, where they differ.
OLD_NAMES = {
    "OwnConfig": "CustomConfig",
    "OwnRequest": "CustomRequest",
    "OwnScheduler": "CustomScheduler",
    "RuleView": "PolicyRequest",
    "VllmKnobs": "CustomVllmConfig",
    "VllmRule": "CustomVllmScheduler",
}
