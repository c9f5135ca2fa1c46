"""Old names of the classes that custom schedulers import."""

#: Names in ``simkv.own``, and the names in ``simkv.custom`` that replace them.
OLD_NAMES = {
    "OwnConfig": "CustomConfig",
    "OwnRequest": "CustomRequest",
    "OwnScheduler": "CustomScheduler",
    "RuleView": "PolicyRequest",
    "VllmKnobs": "CustomVllmConfig",
    "VllmRule": "CustomVllmScheduler",
}
