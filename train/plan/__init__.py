"""`launch.plan=true`: parameters, memory per GPU, tokens and time of a run, estimated from shapes before anything is loaded.

`meta` builds models without weights, `memory` and `step_time` derive the figures of a step, `estimate` those of the run and a
change that makes it fit.
"""
