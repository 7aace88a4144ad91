"""`launch.plan=true`: parameters, memory per GPU, tokens and time of a run, estimated from shapes before anything is loaded."""
