"""Fleets: replicas behind a router, in one world.

    fleet:
      replicas: 4
      router: least_loaded      # or {name: least_loaded, waiting_weight: 4, ...}
      refresh_interval: 0.1     # how old the loads may be that the router reads, in seconds

A router is pure and sees what routers see in life: how many requests wait and run on a replica, and
what it has sent there itself. ``Fleet`` is to the clients what a ``Replica`` is.
"""
