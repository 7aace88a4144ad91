"""The typed configuration: schema, cross-field checks, composition by Hydra, one-line errors.

Imports no torch. Does not own: objects built from it (train.job.build), the YAML files (conf/).
"""
