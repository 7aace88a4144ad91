"""`launch.plan=true`: parameters, memory per GPU, tokens and time of a run, estimated from shapes before anything is loaded.

`meta` builds models without weights, `memory` and `estimate` derive the figures, `search` finds a change that makes them fit.
"""
