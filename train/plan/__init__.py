"""A run without weights: parameters, memory and time, and the change that makes it fit."""
