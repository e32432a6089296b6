"""A measured run, run again with something changed: the trace becomes a program for a clock of its own.

In the order data flows: `graph` is what a replay runs, `inference` reads one off a timeline, `simulation` runs it,
`changes` are what may be different (`wires`, `turns` and `machine` know what transfers take; `buckets`, `order`,
`streams` and `algorithms` change them), `prediction` puts measured and predicted beside each other, `advice` tries
what can be changed. All of it is pure.
"""
