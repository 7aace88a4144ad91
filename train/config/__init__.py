"""The typed configuration: schema, cross-field checks, composition by Hydra, one-line errors. Imports no torch."""
