"""Fleets: several replicas behind a router, in one simulation.

    fleet:
      replicas: 4
      router: least_loaded      # or {name: least_loaded, waiting_weight: 4, ...}
      refresh_interval: 0.1     # maximum age of the loads that the router reads, in seconds

The simulated router has the same information as a real router: the numbers of waiting and running
requests on each replica, and the requests that it sent to each replica. Clients use a ``Fleet``
like a single ``Replica``.
"""
