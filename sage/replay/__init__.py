"""Counterfactual evaluation of policies: recording a decode, replaying it with another policy."""
