"""Virtual time: the clock and its kernel, and the modelled cluster that programs run on.

From the bottom up: `clock` is Trio's clock on integer nanoseconds, and `kernel` moves it. A `flow` is work at a rate
that uses shared resources; `sharing` computes the rates of flows, and `fluid` has all flows in flight. `loads` numbers
the resources of a cluster; `demand`, `loads` and `messages` compute, by the cost model, how much of each resource an
operation uses. `fabric` has all transfers in flight, `traffic` drives it by the kernel's events, and `symmetry` has the
representatives of ranks that behave alike. `compute_cost` prices computes, by a model or by their times in a real run;
`conditions` has imperfections of the cluster, `faults` has faults. On top of these, `simulated_backend` is the backend
of worlds in virtual time, with `simulated_engine`, `simulated_compute` and `injector`; `symmetric_world` has worlds in
which representatives run.
"""
