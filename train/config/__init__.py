"""The typed configuration: schema, cross-field checks, composition by Hydra, and errors in one line.

Does not own: objects built from it (train.run.build), the YAML files (conf/). Nothing here imports torch.
"""
